"""Sums of the objective over micro-batches and ranks, and the losses that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.training.objective import ObjectiveSums

_TERMS = ("loss_sum", "hid", "mid", "kl", "ce", "cmp", "l1", "rank", "Z")


@dataclass(frozen=True)
class Losses:
    """Losses of an optimizer step, or of a validation set, over all of its micro-batches and ranks.

    Attributes:
        Z: scalar, sum of the row weights; everything else is undefined (NaN) where it is 0.
        terms: ``loss`` and the terms of the objective, each a scalar, divided by Z.
        top1: [S] share of the rows of each step in which the draft's best token is the teacher's choice.
        supervised_tokens: scalar, rows of step 1; every supervised token that is unrolled has one.
    """

    Z: Tensor
    terms: dict[str, Tensor]
    top1: Tensor
    supervised_tokens: Tensor

    def named(self, prefix: str) -> dict[str, Tensor]:
        """All of it under ``prefix/`` for loggers."""
        steps = {f"top1_step_{step}": share for step, share in enumerate(self.top1, start=1)}
        out = {**self.terms, "Z": self.Z, "supervised_tokens": self.supervised_tokens, **steps}
        return {f"{prefix}/{name}": value for name, value in out.items()}


class LossSums:
    """Adds up :class:`ObjectiveSums` on the device; one all-reduce gives the losses of all ranks."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._total: Tensor | None = None

    def add(self, sums: ObjectiveSums, step: Tensor) -> None:
        """Adds a micro-batch; ``step`` [R] is the 1-based step of each row."""
        scalars = torch.stack([getattr(sums, name).detach().float() for name in _TERMS])
        counts = torch.zeros(2, self.steps, device=scalars.device)
        counts[0].index_add_(0, step - 1, torch.ones_like(step, dtype=counts.dtype))
        counts[1].index_add_(0, step - 1, sums.agrees.to(counts.dtype))
        added = torch.cat([scalars, counts.flatten()])
        self._total = added if self._total is None else self._total + added

    def pop(self, reduce: Callable[[Tensor], Tensor]) -> Losses | None:
        """The losses so far, summed over ranks by ``reduce``, and starts anew; None if nothing was added."""
        if self._total is None:
            return None
        total, self._total = reduce(self._total), None
        scalars, counts = total[: len(_TERMS)], total[len(_TERMS) :].view(2, self.steps)
        *sums, z = scalars.unbind()
        names = ("loss", *(f"loss_{name}" for name in _TERMS[1:-1]))
        return Losses(
            Z=z,
            terms={name: value / z for name, value in zip(names, sums, strict=True)},
            top1=counts[1] / counts[0],
            supervised_tokens=counts[0, 0],
        )
