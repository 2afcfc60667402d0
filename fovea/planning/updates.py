"""Optimizer updates of a training, counted as Lightning counts them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Batching:
    """How samples become updates.

    Attributes:
        per_device: samples per device and micro-batch.
        accumulation: micro-batches per update.
        devices: that train, over all machines.
        epochs: passes over the samples.
        max_updates: most updates; -1 for no such limit.
        limit_batches: share or number of each device's micro-batches that an epoch takes; None takes all.
    """

    per_device: int
    accumulation: int
    devices: int
    epochs: int
    max_updates: int = -1
    limit_batches: int | float | None = None

    @property
    def per_update(self) -> int:
        """Samples of an update, the global batch."""
        return self.per_device * self.accumulation * self.devices


@dataclass(frozen=True)
class Updates:
    """Optimizer updates of an epoch, of all epochs, and those until the peak of the learning rate."""

    per_epoch: int
    total: int
    warmup: int


def count_updates(samples: int, batching: Batching, *, warmup_steps: int | None, warmup_ratio: float | None) -> Updates:
    """The updates of training on ``samples``.

    Every device gets as many samples as the others, some twice if they do not divide; an epoch's last micro-batch and
    its last update may be smaller. ``warmup_steps`` and ``warmup_ratio`` are the schedule's, at most one of them.
    """
    batches = math.ceil(math.ceil(samples / batching.devices) / batching.per_device)
    if isinstance(batching.limit_batches, float):
        batches = int(batches * batching.limit_batches)
    elif batching.limit_batches is not None:
        batches = min(batches, batching.limit_batches)
    per_epoch = math.ceil(batches / batching.accumulation)
    total = per_epoch * batching.epochs
    if batching.max_updates >= 0:
        total = min(total, batching.max_updates)
    warmup = warmup_steps if warmup_ratio is None else round(total * warmup_ratio)
    return Updates(per_epoch, total, warmup or 0)
