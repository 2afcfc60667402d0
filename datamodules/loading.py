"""How batches are made: the settings, and whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L

from datamodules.curriculum import Curriculum, Mixed
from datamodules.epochs import EpochSampler
from fovea.artifacts.reading import CHECKSUMS, Checksums


@dataclass(frozen=True)
class LoaderConfig:
    """How batches are made.

    Attributes:
        batch_size: samples per rank and batch.
        num_workers: loader processes per rank. 0 reads in the training process: on a CPU a worker that calls torch
            takes the cores that training needs.
        threads: threads per rank that read local shards ahead, in the place of loader processes; 0 leaves it to these.
            Pictures that stand for visual tokens are decoded by processes all the same.
        checksums: when a local sample is compared with its checksum: always, or once, when a process reads it first.
        val_fraction: share of the training artifacts that is kept for validation if there are no others for it.
        seed: of shuffling and of that choice.
        shuffle_buffer: samples among which the next one is drawn when streaming.
        retries: further attempts at a shard that cannot be streamed.
        timeout: seconds without a byte after which a server that streams counts as silent.
        curriculum: how the share of pictures rises over the training; None takes the samples as they are.
    """

    batch_size: int = 4
    num_workers: int = 0
    threads: int = 0
    checksums: Checksums = "always"
    val_fraction: float = 0.05
    seed: int = 0
    shuffle_buffer: int = 256
    retries: int = 3
    timeout: float = 60.0
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.num_workers < 0 or self.threads < 0:
            raise ValueError(f"num_workers and threads must be at least 0, got {self.num_workers} and {self.threads}")
        if self.checksums not in CHECKSUMS:
            raise ValueError(f"checksums must be one of {', '.join(CHECKSUMS)}, got {self.checksums!r}")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction must be in [0, 1), got {self.val_fraction}")
        if self.retries < 0 or self.timeout <= 0:
            raise ValueError(f"retries must be at least 0 and timeout above 0, got {self.retries} and {self.timeout}")
        if self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer must be at least 0, got {self.shuffle_buffer}")


def epoch_sampler(data: Any, trainer: L.Trainer | None, loader: LoaderConfig, *, shuffle: bool) -> EpochSampler:
    """The order of ``data`` on this rank of ``trainer``; without one, on a single rank."""
    if shuffle and isinstance(data, Mixed):
        return data.sampler(trainer, batch_size=loader.batch_size, seed=loader.seed)
    ranks = {"num_replicas": trainer.world_size, "rank": trainer.global_rank} if trainer else {}
    return EpochSampler(len(data), shuffle=shuffle, seed=loader.seed, **ranks)


def epoch_under_way(trainer: L.Trainer | None) -> int:
    """Number of the epoch that ``trainer`` is in, as Lightning tells it to samplers."""
    progress: Any = trainer.fit_loop.epoch_progress.current if trainer else None
    return progress.processed if progress else 0


def batches_done(trainer: L.Trainer | None) -> int:
    """Batches of the epoch that ``trainer`` is in that it has trained on."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready if trainer else 0
