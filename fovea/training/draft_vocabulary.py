"""Training over a draft vocabulary: which tokens it holds, and which rows it can be taught by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fovea.drafters.base import Drafter
from fovea.targets.teacher_batch import TeacherSample
from fovea.training.unroll import Unrolled


def answer_token_counts(samples: Iterable[TeacherSample], vocab_size: int) -> Tensor:
    """[V] int64 how often each token stands in an answer of ``samples``."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += sample.ids[sample.answer_mask].bincount(minlength=vocab_size)
    return counts


def within_vocabulary(unrolled: Unrolled, drafter: Drafter) -> Unrolled:
    """The rows whose token can be drafted; all of them where the vocabulary is whole.

    A row is dropped, not taught the best of the remaining tokens: in decoding its round ends there whatever is drafted.
    """
    if drafter.token_ids is None:
        return unrolled
    kept = torch.isin(unrolled.token, drafter.token_ids)
    rows = ("h_hat", "h_raw", "h_mid", "step", "answer_position", "token", "teacher_index")
    return replace(unrolled, **{name: getattr(unrolled, name)[kept] for name in rows})
