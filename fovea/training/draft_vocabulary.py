"""Training over a draft vocabulary: which tokens it holds, and which rows it can be taught by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fovea.decoding.selection import greedy
from fovea.drafters.base import Drafter
from fovea.targets.teacher_batch import TeacherSample
from fovea.training.unroll import Unrolled

_ROWS_AT_ONCE = 128


def answer_token_counts(samples: Iterable[TeacherSample], vocab_size: int) -> Tensor:
    """[V] int64 how often each token stands in an answer of ``samples``."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += sample.ids[sample.answer_mask].bincount(minlength=vocab_size)
    return counts


@torch.no_grad()
def within_vocabulary(unrolled: Unrolled, drafter: Drafter) -> Unrolled:
    """The rows whose teacher chooses a token that can be drafted; all of them where the vocabulary is whole.

    A row is dropped, not taught the best of the remaining tokens: in decoding its round ends there whatever is drafted.
    """
    if drafter.token_ids is None or not len(unrolled.teacher):
        return unrolled
    head = drafter.head
    chunks = unrolled.teacher.split(_ROWS_AT_ONCE)
    choices = torch.cat([greedy(head.logits(states.to(head.lm_head_weight.dtype))) for states in chunks])
    kept = torch.isin(choices, drafter.token_ids)[unrolled.teacher_index]
    rows = ("h_hat", "h_raw", "h_mid", "step", "answer_position", "teacher_index")
    with torch.enable_grad():
        return replace(unrolled, **{name: getattr(unrolled, name)[kept] for name in rows})
