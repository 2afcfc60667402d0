"""Keeps what a run can be resumed from, and the drafter that it has trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from fovea.drafters.checkpoint import save_drafter


class DrafterCheckpoint(Checkpoint):
    """Saves after every epoch, every few steps if asked, and when the run is interrupted or fails.

    In the run's folder:

    * ``checkpoints/last.ckpt``: drafter, optimizer, schedule and progress; what a run is resumed from.
    * ``drafter/``: the drafter of that checkpoint alone, as :mod:`fovea.drafters.checkpoint` keeps it.
    * ``drafter_best/``: the same of the epoch with the best ``monitor``.

    Names are fixed and every file is replaced in one piece, so a folder can be copied, resumed and interrupted. A run
    that was interrupted within an epoch makes the steps that are left of it; which samples those see is the loader's.

    Args:
        run: folder of the run.
        monitor: logged metric that chooses the best epoch; None keeps no best.
        mode: whether the best value is the lowest or the highest.
        every_n_steps: also save so often, in optimizer steps; None does not.
    """

    LAST = Path("checkpoints") / "last.ckpt"
    NEWEST = Path("drafter")
    BEST = Path("drafter_best")

    def __init__(
        self,
        run: Path | str,
        *,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
        every_n_steps: int | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}; choose from: min, max")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it must be at least 1, or null")
        self.run = Path(run)
        self.monitor = monitor
        self.sign = 1.0 if mode == "min" else -1.0
        self.every_n_steps = every_n_steps
        self.best_score: float | None = None
        self._saved_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step != self._saved_step:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor is not None:
            self._keep_best(trainer, pl_module)
        self._save(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Saving waits for all ranks, and those that did not fail are not coming.
        alone = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt)
        if alone and trainer.global_step > self._saved_step and _finite(pl_module):
            self._save(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]

    def _keep_best(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor not in trainer.callback_metrics:
            # Also so when a run was interrupted in its validation: the resumed one does not validate that epoch.
            rank_zero_warn(
                f"callbacks.checkpoint.monitor is {self.monitor}, which was not logged in this epoch, so no best "
                f"drafter is kept of it; logged: {', '.join(sorted(trainer.callback_metrics))}"
            )
            return
        score = float(trainer.callback_metrics[self.monitor])
        if math.isfinite(score) and (self.best_score is None or self.sign * score < self.sign * self.best_score):
            self.best_score = score
            self._export(trainer, pl_module, self.BEST)

    def _save(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.run / self.LAST)
        self._export(trainer, pl_module, self.NEWEST)

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        if trainer.is_global_zero:
            save_drafter(self.run / folder, pl_module.drafter, pl_module.teaching)


def _finite(pl_module: L.LightningModule) -> bool:
    """Whether the weights are sound: a run that diverged must not replace its last sound checkpoint."""
    return all(bool(parameter.isfinite().all()) for parameter in pl_module.parameters())
