"""Which GPUs the jobs of a sweep see, where several run at once on one machine."""

from __future__ import annotations

import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpusOfJobs(Callback):
    """Job n sees as many GPUs as it asks for, taken in turn from those that the sweep sees: one device, the n-th."""

    def __init__(self) -> None:
        self.visible: list[str] = []

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.visible = visible_gpus()

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if self.visible:
            own = gpus_of(int(config.hydra.job.num), config.trainer.devices, self.visible)
            os.environ[VISIBLE] = ",".join(own)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` has them."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpus_of(job: int, devices: int | str, visible: list[str]) -> list[str]:
    """The GPUs of the job with the number ``job``; all of them if it does not ask for a number."""
    if not isinstance(devices, int) or not 0 < devices < len(visible):
        return visible
    first = job * devices
    return [visible[number % len(visible)] for number in range(first, first + devices)]
