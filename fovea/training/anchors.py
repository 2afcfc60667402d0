"""Anchors: the pairs from which training drafts chains, and how far each chain is taught.

Legend: ``B`` samples, ``T`` tokens, ``S`` steps, ``A`` anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.targets.teacher_batch import TeacherBatch, supervised_positions


@dataclass(frozen=True)
class Anchors:
    """Anchors by sample and pair; all tensors on the host.

    Attributes:
        sample, pair: [A] int64.
        taught: [A, S] bool, whether there is a (supervised) row of that step; true up to the end of the answer.
        found: how many there were before the draw.
    """

    sample: Tensor
    pair: Tensor
    taught: Tensor
    found: int

    @property
    def count(self) -> int:
        return len(self.sample)

    @property
    def last_step(self) -> int:
        """Last step with a row; 0 without anchors."""
        return int(self.taught.sum(1).max()) if self.count else 0

    def alive(self, step: int) -> Tensor:
        """[a] int64 anchors with a row at ``step``; all of their rows are supervised."""
        return self.taught[:, step - 1].nonzero()[:, 0]


def taught_steps(answer_mask: Tensor, steps: int) -> Tensor:
    """[B, T, S] bool: whether pair t, as an anchor, has a supervised row at step s (index s - 1).

    A chain ends with the answer of its anchor: what another turn says later is never drafted from here.
    """
    supervised = supervised_positions(answer_mask)
    ahead = F.pad(supervised, (0, steps)).unfold(1, steps + 1, 1)
    return ahead.to(torch.uint8).cumprod(-1)[..., 1:].bool()


def find_anchors(
    batch: TeacherBatch, steps: int, max_anchors: int | None, generator: torch.Generator | None
) -> Anchors:
    taught = taught_steps(batch.answer_mask.cpu(), steps)
    sample, pair = taught[..., 0].nonzero(as_tuple=True)
    found = len(sample)
    if max_anchors is not None and found > max_anchors:
        drawn = torch.randperm(found, generator=generator)[:max_anchors].sort().values
        sample, pair = sample[drawn], pair[drawn]
    return Anchors(sample, pair, taught[sample, pair], found)
