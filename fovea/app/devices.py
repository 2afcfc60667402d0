"""What ``auto`` stands for on this machine."""

from __future__ import annotations

import logging

import torch

from fovea.hardware import multiplies_bfloat16

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(accelerator: str) -> torch.device:
    """The first device of Lightning's ``accelerator``."""
    if accelerator == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device({"gpu": "cuda"}.get(accelerator, accelerator))


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
