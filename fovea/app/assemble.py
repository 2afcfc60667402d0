"""The parts of a job out of its settings; the order in which they come together is in ``train.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from fovea.app import sources, targets, tracking
from fovea.app.devices import decoding_dtype, device_of
from fovea.app.settings import Settings, read_settings
from fovea.drafters.checkpoint import load_drafter
from fovea.drafters.fovea import FoveaDrafter
from fovea.evaluation.drafter_evaluation import DrafterEvaluation
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.report import print_table, write_report
from fovea.evaluation.results import LosslessnessError
from fovea.targets.load import load_head, load_spec


@dataclass(frozen=True)
class Job:
    """A job whose settings have been checked: the configuration, its dataclasses, its device and its folder."""

    cfg: DictConfig
    settings: Settings
    device: torch.device
    folder: Path


def checked(cfg: DictConfig) -> Job:
    """The job of ``cfg``, refused in seconds if a value, a file or the target is not what it must be."""
    settings = read_settings(cfg)
    targets.require_target(cfg.model)
    return Job(cfg, settings, device_of(cfg.trainer.accelerator), Path(cfg.paths.output_dir))


def find_target(job: Job) -> Path:
    """Checkpoint folder of the target, built if it must be."""
    return targets.find_target(job.cfg, job.settings)


def make_evaluation(job: Job, target: Path) -> DrafterEvaluation:
    """The speed evaluation on the benchmark; the target is loaded when it is first needed."""
    return DrafterEvaluation(
        targets.loader(target, job.cfg.model.dtype, job.device, to_device=False),
        sources.prompts(job.cfg),
        job.settings.tree,
        job.settings.speed,
        settings={"benchmark": job.cfg.benchmark.name},
        progress=job.cfg.trainer.enable_progress_bar,
    )


def trained_drafter(job: Job, target: Path, checkpoint: Path, overrides: Mapping[str, Any]) -> FoveaDrafter:
    """The exported drafter at ``checkpoint``, its settings changed by ``overrides``."""
    head = load_head(target, dtype=decoding_dtype(job.cfg.model.dtype, job.device))
    return load_drafter(checkpoint, head, load_spec(target), overrides)


def conclude(
    job: Job, evaluation: DrafterEvaluation, drafter: FoveaDrafter, device: torch.device, loggers: list[Logger]
) -> dict[str, float]:
    """The final evaluation on all ranks, its report and its table; returns the headline numbers.

    Raises:
        LosslessnessError: after the report was written.
    """
    folder = job.folder / EVALUATIONS / FINAL
    try:
        result = evaluation.run(drafter, folder, device=device, count=job.settings.speed.prompts)
    except LosslessnessError:
        _report(job, loggers)
        raise
    _report(job, loggers)
    return result.summary()


@rank_zero_only
def _report(job: Job, loggers: list[Logger]) -> None:
    result = write_report(job.folder)
    tracking.log_result(loggers, result.summary(), job.folder)
    print_table(result)
    print(f"report in {job.folder / 'report.md'}")
