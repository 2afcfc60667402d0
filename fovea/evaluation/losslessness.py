"""Whether speculative answers are the target's own: exact, explained by a tie of its logits, or not at all.

In fp32 the loops must agree token for token. In half precision the logits of a position depend in their last bits on
how many rows a pass has, so two passes may choose differently where the best two tokens are as good as equal, and
nowhere else. What follows such a token is another text, so answers are compared up to their first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fovea.targets.base import Encoded, Target
from fovea.targets.ties import tie_tolerance

Outcome = Literal["exact", "tie", "unexplained"]


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        key: of the conversation.
        outcome: ``exact``, ``tie`` (differs at a near-tie of half-precision logits) or ``unexplained``.
        position: place of the first difference in the answer; None if exact.
        expected: the autoregressive token there; None if that answer ended before.
        got: the speculative token there; None if that answer ended before.
        gap: distance of the worse of both logits from the largest; None unless looked up.
        tolerance: largest gap that counts as a tie; None unless looked up.
    """

    key: str
    outcome: Outcome
    position: int | None = None
    expected: int | None = None
    got: int | None = None
    gap: float | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        if self.outcome == "exact":
            return f"'{self.key}': exact"
        text = f"'{self.key}': token {self.position} is {self.got} instead of {self.expected}, {self.outcome}"
        return text if self.gap is None else f"{text} (logit gap {self.gap:.3g}, a tie up to {self.tolerance:.3g})"


@torch.inference_mode()
def compare(target: Target, encoded: Encoded, autoregressive: Sequence[int], speculative: Sequence[int]) -> Comparison:
    """Compares two answers to ``encoded``, decoded with the same cap and end tokens.

    The target is asked for its logits at the first difference, in its own precision, unless that is fp32 or better.
    """
    if list(autoregressive) == list(speculative):
        return Comparison(encoded.key, "exact")
    shared = min(len(autoregressive), len(speculative))
    position = next((i for i in range(shared) if autoregressive[i] != speculative[i]), shared)
    expected = autoregressive[position] if position < len(autoregressive) else None
    got = speculative[position] if position < len(speculative) else None
    if torch.finfo(target.dtype).bits >= 32 or expected is None or got is None:
        return Comparison(encoded.key, "unexplained", position, expected, got)
    logits = _next_logits(target, encoded, autoregressive[:position]).double()
    gap = float(logits.max() - logits[[expected, got]].min())
    tolerance = float(tie_tolerance(logits, target.dtype))
    outcome = "tie" if gap <= tolerance else "unexplained"
    return Comparison(encoded.key, outcome, position, expected, got, gap, tolerance)


def _next_logits(target: Target, encoded: Encoded, answer: Sequence[int]) -> Tensor:
    """[V] logits of the token that follows the prompt and ``answer``."""
    state, prefill = target.prefill(encoded, len(answer) + 1)
    hidden = prefill.hidden
    if answer:
        ids = torch.tensor(answer, device=target.device)
        hidden = target.extend(state, ids, state.text_positions(torch.arange(len(answer), device=target.device)))
    return target.lm_head(hidden[-1])
