"""Rotary embedding of the drafter: the target's own, with one axis or M-RoPE sections.

Legend: ``A`` axes, ``E`` head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fovea.targets.base import RopeSpec


class Rotation(NamedTuple):
    """Cosine and sine [..., 1, E] of some positions, with an axis for heads. The first half of the sine is negated, so
    that a rotation of x is ``x * cos + swap_halves(x) * sin`` without a copy for the sign."""

    cos: Tensor
    sin: Tensor

    def at(self, *index: Tensor) -> Rotation:
        """The rotations at an index of the leading axes."""
        return Rotation(self.cos[index], self.sin[index])


class Rotary:
    """Turns positions into rotations. Angles are float32 whatever the model's dtype.

    M-RoPE gives each section of the frequencies its own axis, as transformers' Qwen2.5-VL does.
    """

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._table: Rotation | None = None

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotations [..., 1, E] of ``positions`` [A, ...]; all axes of ordinary text are equal."""
        exponents = torch.arange(0, self._head_dim, 2, device=positions.device, dtype=torch.float32) / self._head_dim
        angles = positions[..., None].float() * (1.0 / self._rope.theta**exponents)
        if self._rope.mrope_section:
            sections = angles.split(self._rope.mrope_section, dim=-1)
            angles = torch.cat([section[axis] for axis, section in enumerate(sections)], dim=-1)
        else:
            angles = angles[0]
        cos, sin = (part.to(dtype).unsqueeze(-2) for part in (angles.cos(), angles.sin()))
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def text(self, start: int, count: int, dtype: torch.dtype, device: torch.device) -> Rotation:
        """Rotations [count, 1, E] of consecutive text positions: views of a table that grows when it must."""
        end, table = start + count, self._table
        if table is None or table.cos.shape[0] < end or table.cos.dtype != dtype or table.cos.device != device:
            size = 1 << end.bit_length()
            positions = torch.arange(size, device=device).expand(self._rope.axes, -1)
            self._table = table = self(positions, dtype)
        return Rotation(table.cos[start:end], table.sin[start:end])
