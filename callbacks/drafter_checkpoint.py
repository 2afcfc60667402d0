"""Keeps what a run can be resumed from, and the drafter that it has trained."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.origin import TRAINED_ON, lineage, origin
from callbacks.progress import continue_epoch, loader_states, settle
from fovea.drafters.checkpoint import save_drafter
from fovea.drafters.whole import exact_state
from fovea.files import room_for
from fovea.training.module import DivergedError

#: What of a run's origin goes along with its drafter.
_TOLD = ("commit", "dirty", "command", "started", "versions", "fingerprints", TRAINED_ON)


class DrafterCheckpoint(Checkpoint):
    """Saves after every epoch, every few minutes or steps within it, and when the run is interrupted or fails.

    In the run's folder:

    * ``checkpoints/last.ckpt``: drafter, optimizer, schedule and progress; what a run is resumed from. A file, or with
      DeepSpeed a folder. It says where the run comes from (:mod:`callbacks.origin`).
    * ``drafter/``: the drafter of that checkpoint alone, as :mod:`fovea.drafters.checkpoint` keeps it.
    * ``drafter_best/``: the same of the epoch with the best ``monitor``.

    Names are fixed and every file is replaced in one piece, so a folder can be copied, resumed and interrupted, and a
    process that dies while it writes leaves the checkpoint before. A checkpoint is always that of an optimizer step: of
    a step whose gradients were being added up nothing is kept, and its batches are left to do. The loader says in it
    which samples of the epoch have been taken (:mod:`datamodules.epochs`), so a resumed run goes on with the next ones.

    Args:
        run: folder of the run.
        monitor: logged metric that chooses the best epoch; None keeps no best.
        mode: whether the best value is the lowest or the highest.
        every_n_steps: save so often within an epoch, in optimizer steps; None does not.
        every_minutes: save when so long ago, in minutes, was the last time; None does not.
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
        every_minutes: float | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}; choose from: min, max")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it must be at least 1, or null")
        if every_minutes is not None and every_minutes < 0:
            raise ValueError(f"every_minutes is {every_minutes}; it must be at least 0, or null")
        self.run = Path(run)
        self.monitor = monitor
        self.sign = 1.0 if mode == "min" else -1.0
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.best_score: float | None = None
        self._saved_step = self._step = 0
        self._saved_at = 0.0
        #: Batches of the epoch up to the last optimizer step; None before the first one of this process.
        self._batches: int | None = None
        self._stepping = self._began = False
        self._loader_states: list[dict[str, Any]] = []

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loader_states = loader_states(checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = True
        self._saved_step = self._step = trainer.global_step
        self._saved_at = time.monotonic()
        continue_epoch(trainer, self._loader_states)
        self._take_over_best(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A run that was killed behind its last step, while it exported, has nothing left to train when it is resumed.
        if trainer.ckpt_path is not None and not self._began:
            self._take_over_best(trainer)
            self._save(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batches is None or batch_idx == 0:
            self._batches = batch_idx

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._stepping = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._step:
            return  # gradients are being added up
        self._step, self._batches, self._stepping = step, batch_idx + 1, False
        # With the last batch comes the end of the epoch, and what is done there is done again if it is cut short.
        if not trainer.is_last_batch and (self._is_turn(step) or self._is_late(trainer)):
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor is not None:
            self._keep_best(trainer, pl_module)
        self._save(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Saving waits for all ranks, and those that did not fail are not coming.
        alone = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt)
        # Within a step some weights may be those of before and some of after; a gradient that diverged moved none.
        sound = _finite(pl_module) and (not self._stepping or isinstance(exception, DivergedError))
        if alone and sound and trainer.global_step > self._saved_step:
            self._save(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["origin"] = origin(self.run, trainer)
        if self._batches is not None:
            settle(checkpoint, self._batches, trainer.train_dataloader)

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

    def _take_over_best(self, trainer: L.Trainer) -> None:
        """A resumed run in a folder of its own has the best drafter so far, though a later epoch may not be better."""
        resumed = trainer.ckpt_path
        best = self.run / self.BEST
        if self.best_score is None or not resumed or best.exists() or not trainer.is_global_zero:
            return
        earlier = Path(resumed).parents[len(self.LAST.parts) - 1] / self.BEST
        if earlier.is_dir():
            partial = best.with_name(f".{best.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            with room_for(best):
                shutil.copytree(earlier, partial)
            partial.rename(best)

    def _is_turn(self, step: int) -> bool:
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def _is_late(self, trainer: L.Trainer) -> bool:
        """Whether the last checkpoint is too old, on any rank: all must save together."""
        if self.every_minutes is None:
            return False
        late = time.monotonic() - self._saved_at >= 60 * self.every_minutes
        return trainer.strategy.reduce_boolean_decision(late, all=False)

    def _save(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._saved_step = trainer.global_step
        last = self.run / self.LAST
        # Beside the file that it replaces: only on one file system can that be done in one piece.
        partial = last.with_name(f".{last.name}.partial")
        try:
            trainer.save_checkpoint(partial)
        except Exception:
            if trainer.is_global_zero:
                discard(partial)  # on a full disk it would keep its room from what is saved next
            raise
        if trainer.is_global_zero:
            replace(last, partial)
        self._export(trainer, pl_module, self.NEWEST)
        self._saved_at = time.monotonic()

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        weights = exact_state(pl_module.drafter)
        if trainer.is_global_zero:
            told = {name: value for name, value in lineage(self.run, trainer).items() if name in _TOLD}
            save_drafter(self.run / folder, pl_module.drafter, pl_module.teaching, weights, told)


def discard(checkpoint: Path) -> None:
    """Removes a ``checkpoint``, file or folder, if it is there."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        shutil.rmtree(checkpoint, ignore_errors=True)
    else:
        checkpoint.unlink(missing_ok=True)


def replace(last: Path, partial: Path) -> None:
    """Puts ``partial`` in the place of ``last``, in one piece.

    A folder, which is what DeepSpeed writes, cannot replace another one: it gets a name of its own, and ``last`` is a
    link to it.
    """
    if not partial.is_dir():
        partial.replace(last)
        return
    earlier = last.resolve() if last.is_symlink() else None
    folder = next(path for n in range(2) if (path := last.with_name(f".{last.name}.{n}")) != earlier)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    link = last.with_name(f".{last.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(last)
    if earlier is not None:
        shutil.rmtree(earlier, ignore_errors=True)


def _finite(pl_module: L.LightningModule) -> bool:
    """Whether the weights are sound: a run that diverged must not replace its last sound checkpoint."""
    return all(bool(parameter.isfinite().all()) for parameter in pl_module.parameters())
