"""What ``auto`` stands for on this machine."""

from __future__ import annotations

import logging
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from fovea.app.typed import SettingError
from fovea.hardware import multiplies_bfloat16

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(accelerator: str) -> torch.device:
    """The first device of Lightning's ``accelerator``."""
    if accelerator == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device({"gpu": "cuda"}.get(accelerator, accelerator))


def gpus_here() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def devices_named(devices: Any) -> int | list[int] | None:
    """Lightning's ``trainer.devices``: a number of devices, or the numbers of some; None for all that there are.

    Raises:
        SettingError: it is none of these.
    """
    plain = OmegaConf.to_container(devices) if OmegaConf.is_config(devices) else devices
    numbers = str(plain).strip("[] ").replace(",", " ").split()
    if str(plain) in ("auto", "-1"):
        return None
    if not numbers or not all(number.isdigit() for number in numbers):
        raise SettingError(f"trainer.devices is {plain}; name a number of devices, such as trainer.devices=2, or auto")
    if isinstance(plain, list) or "," in str(plain):
        return [int(number) for number in numbers]
    return int(numbers[0])


def devices_per_node(trainer: DictConfig) -> int | None:
    """How many devices of a machine ``trainer`` takes; None for all that there are."""
    named = devices_named(trainer.devices)
    return len(named) if isinstance(named, list) else named


def fewer_devices(trainer: DictConfig, here: int) -> str:
    """The overrides by which as many as possible of the ``here`` devices train with the same global batch."""
    together = (devices_per_node(trainer) or 1) * trainer.accumulate_grad_batches
    fewer = max(count for count in range(1, max(1, here) + 1) if together % count == 0)
    return f"trainer.devices={fewer} trainer.accumulate_grad_batches={together // fewer}"


def decoding_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that ``model.dtype`` stands for on ``device``."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and multiplies_bfloat16(device) else torch.float32
    return DTYPES[name]


def training_precision(name: str, device: torch.device) -> str:
    """Lightning's name of the precision that ``trainer.precision`` stands for on ``device``.

    A CPU trains in float32: where it has no unit for bfloat16, that is slower by far.
    """
    if name == "auto":
        return "bf16-mixed" if device.type == "cuda" and multiplies_bfloat16(device) else "32-true"
    return name


def warn_of_emulation(dtype: str, precision: str, device: torch.device) -> None:
    """Says that ``model.dtype`` or ``trainer.precision`` asks for what ``device`` only emulates."""
    asked = [f"model.dtype={dtype}"] if dtype == "bfloat16" else []
    asked += [f"trainer.precision={precision}"] if str(precision).startswith("bf16") else []
    if asked and not multiplies_bfloat16(device):
        log.warning(
            "%s: this %s has no unit for bfloat16 and takes far longer over products in it than in float32; "
            "model.dtype=float32 trainer.precision=32-true is the faster choice",
            " ".join(asked),
            device.type.upper(),
        )
