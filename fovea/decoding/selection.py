"""Which token follows a row of logits: the one rule that the baseline, the verifier and the teacher share.

A sampler for temperatures above zero belongs here, beside :func:`greedy`, so that no loop chooses tokens by itself.
"""

from __future__ import annotations

from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """Ids [...] of the largest of ``logits`` [..., V]; the lowest id among equals.

    ``torch.topk`` and sorts break ties in another order, so they must not take its place anywhere.
    """
    return logits.argmax(dim=-1)
