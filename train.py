"""Trains a drafter and measures it: ``python train.py``, ``python train.py model=qwen25vl experiment=fovea``.

Settings are composed from ``conf/train.yaml``; ``python train.py --help`` shows them all.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from fovea.app.launch import launch


def train(cfg: DictConfig) -> dict[str, float]:
    """The whole job: find the target, export what it teaches, train, measure, report."""
    import lightning as L

    from fovea.app import assemble, runs, tracking
    from fovea.app.inherit import command_line
    from fovea.app.plan import plan_job, wants_plan

    cfg, checkpoint = runs.continued(cfg, command_line())
    if wants_plan(cfg):
        return plan_job(cfg)
    job = assemble.start(cfg)
    loggers = tracking.loggers(cfg)
    L.seed_everything(cfg.seed, workers=True)
    target = assemble.find_target(job)
    evaluation = assemble.make_evaluation(job, target) if job.settings.speed_eval else None
    datamodule = assemble.make_datamodule(job, target)
    module = assemble.make_module(job, target)
    trainer = assemble.make_trainer(job, loggers, evaluation)
    tracking.log_settings(loggers, cfg)
    trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=True)
    assemble.note_data(job, datamodule)
    took = assemble.training_time(trainer)
    if evaluation is None:
        return took
    return took | assemble.conclude(job, evaluation, module.drafter, trainer.strategy.root_device, loggers)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | list[float] | None:
    """One training job; returns the metric, or metrics, that sweepers look at."""
    from fovea.app.job import run_job

    return run_job(cfg, train)


if __name__ == "__main__":
    launch(main, "train")
