"""The visual memory: all images of a request (FOVEA, Eq. 2 and 3), projected once, read by every node.

Legend: ``N`` visual tokens of all images, ``D`` hidden width, ``L`` depths of the tree that may retrieve.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisualMemory:
    """What a drafter retrieves from; without positions, one memory over all images.

    A score ``W_Q (LN(h) + E_dep[depth]) k / sqrt(d)`` is linear in LN(h), so all that does not depend on the node is
    multiplied out when the memory is made: a node's scores are ``LN(h) readers^T + depth_scores[depth]``.

    Attributes:
        readers: [N, D] ``W_Q^T k / sqrt(d)``.
        depth_scores: [L, N] ``E_dep readers^T``; None without a depth embedding.
        values: [N, D] u.
        key_norms: [N] |k|, for the ``static_image`` control.
        valid: [N] bool, or [R, N] if rows belong to different requests; None if all entries are valid.
        generator: source of the draws of the ``random`` control, on the host.
    """

    readers: Tensor
    depth_scores: Tensor | None
    values: Tensor
    key_norms: Tensor | None = None
    valid: Tensor | None = None
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return self.values.shape[0]
