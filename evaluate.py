"""Measures a drafter: ``python evaluate.py ckpt=outputs/<date>/<time>-fovea decode=paper``.

Settings are those of the run that trained it, unless typed; rules of retrieval need no training anew:
``python evaluate.py -m ckpt=... drafter.retrieval.rho=0.6,0.8,0.95``.

On several devices each answers its share of the prompts: ``python evaluate.py ckpt=... trainer.devices=2``.

Methods without weights need no checkpoint: ``python evaluate.py method=pld``. All methods side by side:
``python evaluate.py -m 'method=glob(*)' checkpoints=<folder>``, which holds a run or an exported drafter per method.

An evaluation that was cut short goes on behind its last answer:
``python evaluate.py resume=outputs/<date>/<time>-evaluate``.

What was decoded before is judged without a target: ``traces=<folder>`` reads answers that others have published, and
``audit=[a,b]`` compares two sets of answers.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from fovea.app.launch import launch


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """The whole job: find drafter and target, decode the prompts with and without, report."""
    import lightning as L

    from fovea.app import assemble, runs, tracking
    from fovea.app.inherit import command_line
    from fovea.app.outputs import outputs_job, reads_outputs
    from fovea.app.plan import plan_job, wants_plan
    from fovea.app.ranks import on_ranks

    if wants_plan(cfg):
        return plan_job(cfg)
    if reads_outputs(cfg):
        return outputs_job(cfg)
    cfg, typed = runs.evaluated_again(cfg, command_line())
    cfg, checkpoint = runs.evaluated(cfg, typed)
    job = assemble.start(cfg)
    target = assemble.find_target(job)
    job = on_ranks(job)
    loggers = tracking.loggers(cfg)
    tracking.log_settings(loggers, cfg)
    L.seed_everything(cfg.seed, workers=True)
    evaluation = assemble.make_evaluation(job, target, checkpoint)
    drafter = assemble.judged_drafter(job, target, checkpoint, typed.below("drafter"))
    return assemble.conclude(job, evaluation, drafter, job.device, loggers)


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> float | list[float] | None:
    """One evaluation; returns the metric, or metrics, that sweepers look at."""
    from fovea.app.job import run_job

    return run_job(cfg, evaluate)


if __name__ == "__main__":
    launch(main, "evaluate")
