"""Evaluations over several devices: each process answers its share of the prompts."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import lightning as L
import torch.distributed as dist
from omegaconf import DictConfig

from fovea.app.devices import device_of, devices_named, fewer_devices, gpus_here
from fovea.app.errors import is_lost_rank
from fovea.app.typed import SettingError
from fovea.app.watch import watch
from fovea.training.zero import require_deepspeed

if TYPE_CHECKING:
    from fovea.app.assemble import Job

log = logging.getLogger("fovea")


def several_devices(cfg: DictConfig) -> bool:
    """Whether the settings ask for more than one device."""
    return cfg.trainer.devices not in (1, "1") or cfg.trainer.num_nodes != 1


def require_strategy(cfg: DictConfig) -> None:
    """Refuses a strategy whose package or whose devices are not here, before anything expensive.

    Raises:
        MissingExtraError: the package.
        SettingError: the devices.
    """
    if not str(cfg.strategy.get("_target_")).endswith("ZeroStrategy"):
        return
    require_deepspeed()
    if device_of(cfg.trainer.accelerator).type != "cuda":
        raise SettingError("strategy=deepspeed_zero2 trains on GPUs, and there is none: choose strategy=ddp or fsdp2")


def require_devices(cfg: DictConfig) -> None:
    """Refuses to begin on GPUs that this machine does not have; a CPU takes as many processes as are asked for.

    Raises:
        SettingError: with the settings that keep the global batch on the GPUs that there are.
    """
    trainer = cfg.trainer
    if device_of(trainer.accelerator).type != "cuda":
        return
    here, named = gpus_here(), devices_named(trainer.devices)
    if not here:
        raise SettingError(
            f"trainer.accelerator is {trainer.accelerator} and torch finds no GPU on this machine; "
            "choose trainer.accelerator=cpu, or a build of torch that fits the GPU's driver"
        )
    needed = max(named, default=0) + 1 if isinstance(named, list) else named or 1
    if needed <= here:
        return
    has = f"this machine has {here} GPU{'s' if here > 1 else ''}"
    if isinstance(named, list):
        raise SettingError(f"trainer.devices names GPU {max(named)}, and {has}, numbered from 0")
    if cfg.task != "train":
        raise SettingError(f"trainer.devices asks for {named} GPUs, and {has}; add trainer.devices={here}")
    raise SettingError(
        f"trainer.devices asks for {named} GPUs, and {has}; {fewer_devices(trainer, here)} trains with the same "
        "global batch"
    )


def on_ranks(job: Job) -> Job:
    """``job`` on the device of this process, which starts the other ones and joins them, if there are to be any.

    They run the same command from its beginning; what is built once (the target) must be there before.

    Raises:
        SettingError: the job cannot be shared.
    """
    if not several_devices(job.cfg):
        return job
    if job.settings.budget is not None:
        raise SettingError("visual budgets are measured on one device: add trainer.devices=1, or leave diagnostics out")
    trainer = job.cfg.trainer
    fabric = L.Fabric(accelerator=trainer.accelerator, devices=trainer.devices, num_nodes=trainer.num_nodes)
    watch(fabric.strategy.launcher, job.folder)
    fabric.launch()
    return replace(job, device=fabric.device)


def wait_for_all() -> None:
    """Returns when all processes of the job have come here; the first one does so, too, when another one is gone.

    What the first one has done before is whole without the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        if dist.get_rank() != 0 or not is_lost_rank(error):
            raise
        log.warning("another rank is gone, and nothing is lost by it: everything had been written")
