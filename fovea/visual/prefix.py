"""Which visual tokens the drafter keeps in its own context; the memory keeps all of them in any case."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fovea.visual.pictures import pictures

VisualPrefix = Literal["full", "topk", "none"]


def kept_in_prefix(visual: Tensor, is_visual: Tensor, prefix: VisualPrefix, ratio: float) -> Tensor:
    """[T] bool over tokens: those outside pictures, and of each picture all, none, or its best visual tokens.

    ``topk`` keeps the ceil(ratio n) of a picture's n tokens that have the largest norm (equal: lower index). The paper
    does not say how it ranks. A norm needs the picture alone, and ranking picture by picture makes the choice
    independent of what comes later, so training and decoding keep the same ones.

    Args:
        visual: [N, D] visual tokens in prompt order.
        is_visual: [T] bool, their N places; a run of them is a picture.
        prefix: what to keep.
        ratio: share for ``topk``, in (0, 1].
    """
    kept = ~is_visual if prefix != "full" else torch.ones_like(is_visual)
    if prefix != "topk":
        return kept
    norms = visual.float().norm(dim=-1)
    for start, end in pictures(is_visual):
        own, norms = norms.split((end - start, len(norms) - (end - start)))
        order = own.sort(descending=True, stable=True).indices
        kept[start + order[: math.ceil(ratio * (end - start))]] = True
    return kept


def most_important(importance: Tensor, is_visual: Tensor, share: float) -> Tensor:
    """[T] bool over tokens: those outside pictures, and of each picture the most important visual tokens (DREAM).

    Of a picture's n tokens floor(share n) stay, at least one (equal importance: lower index). The published code ranks
    all pictures of a conversation together; by itself each picture's choice is independent of what comes later.

    Args:
        importance: [N] of the visual tokens in prompt order.
        is_visual: [T] bool, their N places; a run of them is a picture.
        share: in (0, 1].
    """
    kept = ~is_visual
    for start, end in pictures(is_visual):
        own, importance = importance.split((end - start, len(importance) - (end - start)))
        order = own.sort(descending=True, stable=True).indices
        kept[start + order[: max(1, int(share * (end - start)))]] = True
    return kept
