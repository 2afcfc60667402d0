"""How fast training is and how much memory it takes."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch

from fovea.targets.teacher_batch import TeacherBatch


class Throughput(L.Callback):
    """Logs rates over all ranks, each over the steps since the last entry, and the peak memory of the run.

    ``throughput/tokens_per_s`` counts tokens of the artifacts without padding, ``throughput/supervised_tokens_per_s``
    their answer tokens, ``throughput/steps_per_s`` optimizer steps; waiting for data counts, evaluations do not.
    ``throughput/peak_memory_gib`` is that of the device's allocator, or on a CPU of the whole process, on this rank.
    Entries come as often as the trainer logs. ``throughput/train_s``, once an epoch, is how long all training steps
    have taken, those of the runs included that this one goes on from.
    """

    def __init__(self) -> None:
        self._start = self._paused_at = self._lap = self._trained_s = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"train_s": self._trained_s}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._trained_s = state_dict.get("train_s", 0.0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._device = pl_module.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        # An epoch that is resumed in its middle has no start.
        self._begin(trainer)
        self._lap = self._start

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # What lies between epochs is evaluation; the window that it cuts is dropped.
        self._begin(trainer)
        self._lap = self._start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("throughput/train_s", self._trained_s)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.perf_counter()
        self._start += now - self._paused_at
        self._lap += now - self._paused_at

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: TeacherBatch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._trained_s, self._lap = self._trained_s + now - self._lap, now
        self._tokens = self._tokens + torch.stack([batch.valid.sum(), batch.answer_mask.sum()])
        steps = trainer.global_step - self._first_step
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if not steps or trainer.global_step % every:
            return
        seconds = self._now() - self._start
        tokens, supervised = trainer.strategy.reduce(self._tokens.float(), reduce_op="sum").tolist()
        pl_module.log_dict(
            {
                "throughput/tokens_per_s": tokens / seconds,
                "throughput/supervised_tokens_per_s": supervised / seconds,
                "throughput/steps_per_s": steps / seconds,
                "throughput/peak_memory_gib": self._peak_memory(),
            }
        )
        self._begin(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        self._start = self._now()
        self._first_step = trainer.global_step
        self._tokens = torch.zeros(2, dtype=torch.int64, device=self._device)

    def _now(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _peak_memory(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        # Kilobytes, but bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
