"""Whether speculative answers are the target's own: exact, explained by a tie of its logits, or not at all.

In fp32 the loops must agree token for token. In half precision the logits of a position depend in their last bits on
how many rows a pass has, so two passes may choose differently where the best two tokens are as good as equal, and
nowhere else. What follows such a token is another text, so answers are compared up to their first difference.

Sampled answers are compared in the same way: both loops draw with the same noise, so they differ only where rounding
decides a draw. That may happen in fp32 too, since a draw has no margin: any two tokens may come as close as they like.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from fovea.decoding.selection import GREEDY, Selection, Selector
from fovea.decoding.stopping import token_cap
from fovea.targets.base import Encoded, Target
from fovea.targets.ties import tie_tolerance

Outcome = Literal["exact", "tie", "unexplained"]

#: Draws in fp32 may differ by so many times more: there sums of many terms, not the layers' outputs, make the rounding.
_FP32 = 16


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        key: of the conversation.
        outcome: ``exact``, ``tie`` (differs at a near-tie of half-precision logits, or of a draw) or ``unexplained``.
        position: place of the first difference in the answer; None if exact.
        expected: the autoregressive token there; None if that answer ended before.
        got: the speculative token there; None if that answer ended before.
        gap: distance of the worse of both logits from the largest, processed and with noise as the answers' were; None
            unless looked up, and where no distance decided but who is inside a nucleus.
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
def compare(
    target: Target,
    encoded: Encoded,
    autoregressive: Sequence[int],
    speculative: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    selection: Selection = GREEDY,
) -> Comparison:
    """Compares two answers to ``encoded``, decoded with the same cap, end tokens and selection.

    The target is asked for its logits at the first difference, in its own precision, unless that is fp32 or better and
    nothing was drawn.
    """
    if list(autoregressive) == list(speculative):
        return Comparison(encoded.key, "exact")
    shared = min(len(autoregressive), len(speculative))
    position = next((i for i in range(shared) if autoregressive[i] != speculative[i]), shared)
    expected = autoregressive[position] if position < len(autoregressive) else None
    got = speculative[position] if position < len(speculative) else None
    full = torch.finfo(target.dtype).bits >= 32
    if (full and not selection.sampled) or expected is None or got is None:
        return Comparison(encoded.key, "unexplained", position, expected, got)
    logits = _next_logits(target, encoded, autoregressive[:position]).double()
    tolerance = float(tie_tolerance(logits, target.dtype)) * (_FP32 if full else 1)
    eos_ids = target.spec.eos_ids if eos_ids is None else eos_ids
    selector = selection.begin(target, encoded, eos_ids, token_cap(target.spec, encoded, max_new_tokens))
    selector.follow(autoregressive[:position])
    tie = all(_could_be_selected(selector, logits, token, tolerance) for token in (expected, got))
    scores = selector.scores(logits[None])[0]
    gap = float(scores.max() - scores[[expected, got]].min()) * (selection.temperature or 1.0)
    by_distance = isfinite(gap) and (gap <= tolerance or not tie)
    outcome = "tie" if tie else "unexplained"
    return Comparison(encoded.key, outcome, position, expected, got, gap if by_distance else None, tolerance)


def _could_be_selected(selector: Selector, logits: Tensor, token: int, tolerance: float) -> bool:
    """Whether ``token`` is selected if its logit rises by ``tolerance``, or if those of all that beat it fall by it:
    that may put it inside the rim of a nucleus, or them outside."""
    scores = selector.scores(logits[None])[0]
    rise = torch.zeros_like(logits)
    rise[token] = tolerance
    fall = (scores > scores[token]) * -tolerance
    shifted = (selector.scores((logits + shift)[None])[0] for shift in (rise, fall))
    return any(bool(scores[token] >= scores.max()) for scores in shifted)


def _next_logits(target: Target, encoded: Encoded, answer: Sequence[int]) -> Tensor:
    """[V] logits of the token that follows the prompt and ``answer``."""
    state, prefill = target.prefill(encoded, len(answer) + 1)
    hidden = prefill.hidden
    if answer:
        ids = torch.tensor(answer, device=target.device)
        hidden = target.extend(state, ids, state.text_positions(torch.arange(len(answer), device=target.device)))
    return target.lm_head(hidden[-1])
