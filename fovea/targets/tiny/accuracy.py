"""How often the target answers right, with the right picture and with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fovea.targets.conversation import Conversation
from fovea.targets.tiny.batches import Batch, Encoder
from fovea.targets.tiny.families import FAMILIES, Pictures, conversations
from fovea.targets.tiny.scenes import Turn
from fovea.targets.tiny.training import answer_logits


class UnreadablePicturesError(RuntimeError):
    """The trained target does not read its pictures well enough to be published."""


@dataclass(frozen=True)
class FamilyAccuracy:
    """Shares of held-out questions answered exactly: with their picture, and with that of another question.

    ``wrong_picture`` is None for questions without a picture. ``tokens`` is the share of answer tokens foreseen, given
    the right ones before them.
    """

    questions: int
    exact: float
    tokens: float
    wrong_picture: float | None


def measure(
    model: PreTrainedModel, encoder: Encoder, pictures: Pictures, questions: int, device: torch.device
) -> dict[str, FamilyAccuracy]:
    """Accuracy by family of ``pictures`` over ``questions`` held-out ones of each.

    An answer counts if greedy decoding would write it token for token: if every token is the most likely one behind
    the right ones before it.
    """
    families = FAMILIES[pictures]
    asked = conversations("heldout", questions * len(families), 0, pictures)
    report = {}
    for family in families:
        own = [c for c in asked if c.source == family]
        exact, tokens = _foresee(model, encoder, own, 0, device)
        wrong = _foresee(model, encoder, own, 1, device)[0] if own[0].images else None
        report[family] = FamilyAccuracy(len(own), exact, tokens, wrong)
    return report


def require_reading(report: dict[str, FamilyAccuracy], min_gain: float) -> None:
    """Refuses a target whose accuracy with the right pictures does not clearly beat that with wrong ones.

    Raises:
        UnreadablePicturesError: naming the figures.
    """
    seen = {name: f for name, f in report.items() if f.wrong_picture is not None}
    gain = sum(f.exact - (f.wrong_picture or 0) for f in seen.values()) / len(seen)
    if gain < min_gain:
        figures = ", ".join(f"{name} {f.exact:.2f}/{f.wrong_picture:.2f}" for name, f in seen.items())
        raise UnreadablePicturesError(
            f"the target gained {gain:.2f} of exact answers from the right picture, less than min_gain={min_gain:g} "
            f"(right/wrong picture: {figures}); train it longer, or with another seed"
        )


@torch.inference_mode()
def _foresee(
    model: PreTrainedModel,
    encoder: Encoder,
    asked: list[Conversation],
    shift: int,
    device: torch.device,
) -> tuple[float, float]:
    """Shares of answers and of tokens foreseen when question i is shown the picture of question i + ``shift``."""
    exact = right = total = 0
    for batch in _batches(encoder, asked, shift):
        logits, wanted, rows = answer_logits(model, batch.to(device))
        hit = logits.argmax(-1) == wanted
        right, total = right + int(hit.sum()), total + len(wanted)
        missed = rows[~hit].unique()
        exact += batch.ids.shape[0] - len(missed)
    return exact / len(asked), right / total


def _batches(encoder: Encoder, asked: list[Conversation], shift: int, size: int = 20) -> Iterator[Batch]:
    pictures = [c.images for c in asked]
    items = []
    for index, conversation in enumerate(asked):
        question = conversation.messages[-1]["content"][-1]["text"]
        turn = Turn(conversation.source, question, conversation.answer or "")
        items.append((pictures[(index + shift) % len(asked)], [turn]))
    for start in range(0, len(items), size):
        yield encoder.batch(items[start : start + size])
