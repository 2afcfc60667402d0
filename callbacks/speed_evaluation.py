"""Measures decoding speed while a drafter is trained, and logs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.seed import isolate_rng

from callbacks.speed_logging import log_to_wandb, scalars
from fovea.evaluation.drafter_evaluation import DrafterEvaluation
from fovea.evaluation.history import EPOCH, EVALUATIONS
from fovea.evaluation.results import SpeedResult
from fovea.evaluation.unfinished import discard_answers


class SpeedEvaluation(L.Callback):
    """Runs a speed evaluation of the module's ``drafter`` after every ``every_n_epochs``-th epoch.

    Training goes on as if nothing had happened: the drafter is only read, random states are put back, and the target
    is held by the evaluation, so it is in no checkpoint and in no optimizer. Scalars go to every logger under
    ``speed/``, ``acceptance/`` and ``retrieval/``; histograms, a table of answers and pictures to W&B.

    Args:
        evaluation: target, prompts and settings.
        run: folder of the run; each evaluation gets a folder in it.
        every_n_epochs: epochs from one evaluation to the next.
    """

    def __init__(self, evaluation: DrafterEvaluation, run: Path | str, *, every_n_epochs: int = 1) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs is {every_n_epochs}; it must be at least 1")
        self.evaluation = evaluation
        self.run = Path(run)
        self.every_n_epochs = every_n_epochs
        #: The last result, pooled over ranks.
        self.result: SpeedResult | None = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs:
            return
        module: Any = pl_module
        folder = self.run / EVALUATIONS / EPOCH.format(epoch)
        with isolate_rng():
            self.result = self.evaluation.run(
                module.drafter, folder, device=module.device, count=self.evaluation.config.prompts_per_epoch
            )
        if trainer.is_global_zero:
            discard_answers(folder)
        # All ranks hold the pooled result; its mean over ranks is itself.
        module.log_dict(scalars(self.result), on_step=False, on_epoch=True, sync_dist=True)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                log_to_wandb(logger.experiment, self.result, folder, trainer.global_step)
