"""How many optimizer updates a job makes, and whether its learning-rate schedule fits into them."""

from __future__ import annotations

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from fovea.app.devices import devices_per_node
from fovea.app.typed import SettingError
from fovea.planning.updates import Batching, Updates, count_updates


def batching_of(cfg: DictConfig, devices: int) -> Batching:
    """How the samples of the job become updates on ``devices`` devices of each machine."""
    trainer = cfg.trainer
    return Batching(
        per_device=cfg.data.loader.batch_size,
        accumulation=trainer.accumulate_grad_batches,
        devices=devices * trainer.num_nodes,
        epochs=trainer.max_epochs,
        max_updates=trainer.max_steps,
        limit_batches=trainer.limit_train_batches,
    )


def updates_of(cfg: DictConfig, samples: int, batching: Batching) -> Updates:
    """The updates of training on ``samples``."""
    schedule = cfg.scheduler
    return count_updates(
        samples,
        batching,
        warmup_steps=schedule.get("warmup_steps"),
        warmup_ratio=schedule.get("warmup_ratio"),
    )


def schedule_fault(cfg: DictConfig, updates: int) -> str | None:
    """What the job's schedule has against so many ``updates``; None for nothing."""
    if "_target_" not in cfg.scheduler:
        return None
    try:
        instantiate(cfg.scheduler)(torch.optim.SGD([torch.zeros(1)], lr=1.0), total_steps=updates)
    except ValueError as error:
        return str(error)
    return None


def require_updates(cfg: DictConfig, conversations: int) -> None:
    """Refuses a schedule that is longer than a training on so many ``conversations``.

    Each gives one sample at most, so there are no more updates than are counted here.

    Raises:
        SettingError: in the schedule's own words.
    """
    if (cfg.trainer.max_epochs or -1) < 0:
        return  # it ends by another rule, if at all
    most = updates_of(cfg, conversations, batching_of(cfg, devices_per_node(cfg.trainer) or 1)).total
    if fault := schedule_fault(cfg, most):
        raise SettingError(f"{conversations:,} conversations make at most {most:,} optimizer updates: {fault}")
