"""Which visual tokens the drafter keeps in its own context; the memory keeps all of them in any case."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

VisualPrefix = Literal["full", "topk", "none"]


def kept_in_prefix(visual: Tensor, prefix: VisualPrefix, ratio: float) -> Tensor:
    """[N] bool over ``visual`` [N, D]: all, none, or the ceil(ratio N) tokens of largest norm (equal: lower index).

    The paper does not say how it ranks. A norm needs the picture alone, so training and decoding keep the same ones.
    """
    entries = visual.shape[0]
    if prefix == "full":
        return torch.ones(entries, dtype=torch.bool, device=visual.device)
    kept = torch.zeros(entries, dtype=torch.bool, device=visual.device)
    if prefix == "topk":
        order = visual.float().norm(dim=-1).sort(descending=True, stable=True).indices
        kept[order[: math.ceil(ratio * entries)]] = True
    return kept
