"""Encoded conversations as one batch.

Legend: ``B`` conversations, ``T`` tokens of the longest, ``A`` rotary axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fovea.targets.base import Encoded
from fovea.targets.teacher_batch import supervised_positions


@dataclass(frozen=True)
class PaddedBatch:
    """Ids [B, T], positions [A, B, T] and masks [B, T]; zero and false where padded."""

    ids: Tensor
    positions: Tensor
    is_visual: Tensor
    supervised: Tensor
    valid: Tensor


def pad(batch: Sequence[Encoded], side: Literal["left", "right"], device: torch.device) -> PaddedBatch:
    """``batch`` padded on ``side``: right for one causal pass, left to go on behind all of them at once."""
    lengths = [encoded.ids.shape[0] for encoded in batch]
    shape = (len(batch), max(lengths))
    out = PaddedBatch(
        ids=torch.zeros(shape, dtype=torch.int64),
        positions=torch.zeros((batch[0].positions.shape[0], *shape), dtype=torch.int64),
        is_visual=torch.zeros(shape, dtype=torch.bool),
        supervised=torch.zeros(shape, dtype=torch.bool),
        valid=torch.zeros(shape, dtype=torch.bool),
    )
    for row, (encoded, length) in enumerate(zip(batch, lengths, strict=True)):
        place = slice(0, length) if side == "right" else slice(shape[1] - length, shape[1])
        out.ids[row, place] = encoded.ids
        out.positions[:, row, place] = encoded.positions
        out.is_visual[row, place] = encoded.is_visual
        out.supervised[row, place] = supervised_positions(encoded.answer_mask)
        out.valid[row, place] = True
    return PaddedBatch(*(tensor.to(device) for tensor in vars(out).values()))
