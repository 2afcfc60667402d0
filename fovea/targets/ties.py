"""Near-ties: tokens whose logits are so close that rounding alone may put one before the other."""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest gap of a tie, in rounding steps of the largest logit. A pass rounds every layer's output, so logits of equal
#: inputs differ by a few steps (answers of the tests' bf16 target differed within 2.7).
TIE_STEPS = 4


def tie_tolerance(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] largest gap between two of ``logits`` [..., V] that rounding to ``dtype`` explains."""
    return TIE_STEPS * torch.finfo(dtype).eps * logits.amax(-1).abs()
