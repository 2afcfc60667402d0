"""The visual memory: keys and values of all images of a request (FOVEA, Eq. 2 and 3), made once, read by every node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class VisualMemory:
    """What a drafter retrieves from; without positions, one memory over all images.

    Attributes:
        keys: [N, D].
        values: [N, D].
        valid: [N] bool, or [R, N] if rows belong to different requests; None if all entries are valid.
        generator: source of the draws of the ``random`` control, on the host.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None = None
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return self.keys.shape[0]


class MemoryProjection(nn.Module):
    """``k = W_K LN(v)``, ``u = W_U LN(v)``: one affine LayerNorm, two matrices without bias, all widths D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(
        self, visual: Tensor, valid: Tensor | None = None, generator: torch.Generator | None = None
    ) -> VisualMemory:
        """The memory of ``visual`` [N, D]; what entries that are not ``valid`` [N] hold does not matter."""
        if valid is not None:
            visual = visual.masked_fill(~valid[:, None], 0.0)
        normed = self.norm(visual)
        return VisualMemory(self.key(normed), self.value(normed), valid, generator)
