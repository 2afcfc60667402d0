"""A visual budget: how many of a request's visual tokens a drafter may see, and which (FOVEA, Appendix A).

Legend: ``T`` tokens of the prompt, ``N`` visual tokens among them.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from fovea.targets.base import Prefill


def retained_count(count: int, ratio: float) -> int:
    """k(r) of ``count`` visual tokens at the budget ``ratio`` in [0, 1] (Eq. 21): none at 0, else at least one.

    The ratio counts as the decimal number that it is written as: 0.29 of 100 tokens are 29.
    """
    if ratio == 0:
        return 0
    return min(count, max(1, int(Fraction(str(ratio)) * count)))


def within_budget(importance: Tensor, is_visual: Tensor, ratio: float) -> Tensor:
    """[T] bool over tokens: those outside pictures, and the k(r) most important visual tokens (equal: lower index).

    All pictures of the prompt are ranked together, since N counts them together.

    Args:
        importance: [N] of the visual tokens in prompt order.
        is_visual: [T] bool, their N places.
        ratio: the budget, in [0, 1].
    """
    kept = ~is_visual
    (places,) = is_visual.nonzero(as_tuple=True)
    order = importance.sort(descending=True, stable=True).indices
    kept[places[order[: retained_count(len(places), ratio)]]] = True
    return kept


def restricted(prefill: Prefill, kept: Tensor, *, states_leave: bool) -> Prefill:
    """``prefill`` with the ``kept`` [T] bool tokens alone, in their order and at their positions.

    Whatever a drafter makes of it, its context and its memory know nothing of a visual token that is left out. Where
    ``states_leave``, a token takes its state along, and the next one joins the state before it among those that stay.
    Otherwise a token keeps the true state before it, the pair that it was trained with.
    """
    if bool(kept.all()):
        return prefill
    (tokens,) = kept.nonzero(as_tuple=True)
    before = tokens
    if not states_leave:
        # Row j of the states is read beside token j + 1.
        before = torch.cat((tokens[1:] - 1, tokens[-1:]))
    visual = kept[prefill.is_visual]
    importance, attention = prefill.importance, prefill.visual_attention
    return replace(
        prefill,
        ids=prefill.ids[tokens],
        positions=prefill.positions[:, tokens],
        embeds=prefill.embeds[tokens],
        hidden=prefill.hidden[before],
        visual=prefill.visual[visual],
        is_visual=prefill.is_visual[tokens],
        capacity=prefill.capacity - (len(kept) - len(tokens)),
        answer_mask=None if prefill.answer_mask is None else prefill.answer_mask[tokens],
        importance=None if importance is None else lambda: importance()[visual],
        visual_attention=None if attention is None else lambda rows: attention(tokens[rows])[:, visual],
        features=None if prefill.features is None else prefill.features[before],
    )
