"""What the target teaches a drafter, the same whether it was read from shards or computed in the training step.

Legend: ``B`` samples, ``T`` tokens, ``A`` rotary axes, ``N`` visual tokens, ``D`` hidden width,
``R`` supervised positions of the whole batch.

A position t is *supervised* when the token at t + 1 belongs to an answer: the target's state there predicts a token
that the drafter will have to predict. ``answer_mask`` marks tokens, ``supervised`` marks positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fovea.targets.reused_memory import ReusedMemory

#: Of the batches of this process.
_MEMORY = ReusedMemory()


def supervised_positions(answer_mask: Tensor) -> Tensor:
    """[..., T] bool: positions whose next token is marked in ``answer_mask`` [..., T]; never the last one."""
    return torch.cat([answer_mask[..., 1:], torch.zeros_like(answer_mask[..., :1])], dim=-1)


@dataclass(frozen=True)
class TeacherSample:
    """One conversation as an artifact holds it.

    Attributes:
        key: of the conversation.
        ids: [T] int64.
        positions: [A, T] int64.
        answer_mask: [T] bool over tokens.
        is_visual: [T] bool.
        last: [T, D] states f, after the final norm.
        mid: [R, D] mid states at the supervised positions, in order.
        visual: [N, D] projected visual tokens in prompt order; no numbers (NaN) where ``pictures`` stand for them.
        grids: rows and columns of each grid of visual tokens, in the order of the prompt.
        importance: [N] float32, how much the target attends to each visual token, see
            :func:`fovea.targets.importance.visual_importance`; None where it is not known.
        features: [T, k D] outputs of ``feature_layers`` side by side; None without such layers.
        feature_layers: k of them, see :mod:`fovea.targets.feature_layers`.
        pictures: encoded pictures, each [bytes] uint8, from which the visual tokens are to be computed again; None
            where ``visual`` holds them.
    """

    key: str
    ids: Tensor
    positions: Tensor
    answer_mask: Tensor
    is_visual: Tensor
    last: Tensor
    mid: Tensor
    visual: Tensor
    grids: tuple[tuple[int, int], ...] = ()
    importance: Tensor | None = None
    features: Tensor | None = None
    feature_layers: tuple[int, ...] = ()
    pictures: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class TeacherBatch:
    """Samples padded on the right.

    Attributes:
        keys: of the conversations, B of them.
        ids: [B, T] int64, 0 where padded.
        positions: [B, A, T] int64.
        valid: [B, T] bool, false where padded.
        answer_mask: [B, T] bool over tokens, false where padded.
        is_visual: [B, T] bool.
        last: [B, T, D] states f.
        mid: [R, D] mid states at ``supervised_positions(answer_mask)``, sample by sample.
        visual: [B, N, D] visual tokens, zero where padded.
        visual_valid: [B, N] bool.
        importance: [B, N] float32 of the visual tokens, zero where padded; None if that of any sample is not known.
        features: [B, T, k D] outputs of ``feature_layers`` side by side; None without such layers.
        feature_layers: k of them, the same for all samples.
    """

    keys: tuple[str, ...]
    ids: Tensor
    positions: Tensor
    valid: Tensor
    answer_mask: Tensor
    is_visual: Tensor
    last: Tensor
    mid: Tensor
    visual: Tensor
    visual_valid: Tensor
    importance: Tensor | None = None
    features: Tensor | None = None
    feature_layers: tuple[int, ...] = ()

    def read(self, layers: tuple[int, ...]) -> Tensor:
        """[B, T, F] the states that a drafter of the feature layers ``layers`` reads; f for one of none.

        Raises:
            ValueError: the batch lacks one of them.
        """
        if not layers:
            return self.last
        if self.features is None or not set(layers) <= set(self.feature_layers):
            raise ValueError(
                f"the drafter reads the outputs of layers {list(layers)} and the samples hold those of "
                f"{list(self.feature_layers)}; teach or export with feature_layers={list(layers)}"
            )
        if self.feature_layers == layers:
            return self.features
        outputs = self.features.chunk(len(self.feature_layers), dim=-1)
        return torch.cat([outputs[self.feature_layers.index(layer)] for layer in layers], dim=-1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TeacherBatch:
        """The batch on ``device``; states are cast to ``dtype`` if one is given, an order by importance stays exact."""
        moved = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                cast = dtype if value.is_floating_point() and item.name != "importance" else None
                moved[item.name] = value.to(device=device, dtype=cast, non_blocking=True)
        return replace(self, **moved)

    def pin_memory(self) -> TeacherBatch:
        """The batch in pinned memory, which a GPU copies from while the host goes on; loaders call it by this name."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: part.pin_memory() for name, part in parts.items() if isinstance(part, Tensor)})

    @staticmethod
    def collate(samples: Sequence[TeacherSample]) -> TeacherBatch:
        """Pads ``samples`` to their longest; a sample alone and the same sample in a batch train alike."""
        batch, length = len(samples), max(s.ids.shape[0] for s in samples)
        entries = max(s.visual.shape[0] for s in samples)
        first = samples[0]
        out = TeacherBatch(
            keys=tuple(s.key for s in samples),
            ids=torch.zeros(batch, length, dtype=torch.int64),
            positions=torch.zeros(batch, first.positions.shape[0], length, dtype=torch.int64),
            valid=torch.zeros(batch, length, dtype=torch.bool),
            answer_mask=torch.zeros(batch, length, dtype=torch.bool),
            is_visual=torch.zeros(batch, length, dtype=torch.bool),
            last=_padded([s.last for s in samples], length),
            mid=_joined([s.mid for s in samples]),
            visual=_padded([s.visual for s in samples], entries),
            visual_valid=torch.zeros(batch, entries, dtype=torch.bool),
            importance=_padded_importance(samples, entries),
            features=None if first.features is None else _padded([_features(s) for s in samples], length),
            feature_layers=first.feature_layers,
        )
        for row, sample in enumerate(samples):
            tokens, seen = sample.ids.shape[0], sample.visual.shape[0]
            out.ids[row, :tokens] = sample.ids
            out.positions[row, :, :tokens] = sample.positions
            out.valid[row, :tokens] = True
            out.answer_mask[row, :tokens] = sample.answer_mask
            out.is_visual[row, :tokens] = sample.is_visual
            out.visual_valid[row, :seen] = True
        return out


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """[B, ``length``, D] of B states [., D], zero behind them; each number is written once.

    A loader's worker writes to memory that it shares with the process that trains: what is elsewhere would be copied
    there. ``default_collate`` does the same.
    """
    out = _memory((len(rows), length, rows[0].shape[1]), rows[0])
    for place, states in zip(out, rows, strict=True):
        _copy(states, place[: len(states)])
        place[len(states) :] = 0
    return out


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """[., D] rows of all, one behind the other; in memory as above."""
    out = _memory((sum(map(len, rows)), rows[0].shape[1]), rows[0])
    for place, states in zip(out.split([len(states) for states in rows]), rows, strict=True):
        _copy(states, place)
    return out


def _memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory of this shape for states of the dtype and device of ``like``."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    if get_worker_info() is None or not math.prod(shape):
        return _MEMORY.empty(shape, like.dtype)
    shared = like._typed_storage()._new_shared(math.prod(shape), device=like.device)
    return like.new(shared).resize_(shape)


def _copy(states: Tensor, place: Tensor) -> None:
    """Writes ``states`` into ``place``; on a CPU by the C library, which writes past the caches what is large."""
    plain = states.is_contiguous() and states.stride(-1) == 1 and states.dtype == place.dtype
    if plain and states.device.type == "cpu":
        np.copyto(place.view(torch.uint8).numpy(), states.view(torch.uint8).numpy())
    else:
        place.copy_(states)


def _features(sample: TeacherSample) -> Tensor:
    assert sample.features is not None, "samples of a batch hold the same layers"
    return sample.features


def _padded_importance(samples: Sequence[TeacherSample], entries: int) -> Tensor | None:
    """[B, ``entries``]; None if a sample's is not known."""
    out = torch.zeros(len(samples), entries)
    for row, sample in enumerate(samples):
        if sample.importance is not None:
            out[row, : len(sample.importance)] = sample.importance
        elif len(sample.visual):
            return None
    return out
