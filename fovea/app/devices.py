"""What ``auto`` stands for on this machine."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(accelerator: str) -> torch.device:
    """The first device of Lightning's ``accelerator``."""
    if accelerator == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device({"gpu": "cuda"}.get(accelerator, accelerator))


def decoding_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that ``model.dtype`` stands for on ``device``."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return DTYPES[name]


def training_precision(name: str, device: torch.device) -> str:
    """Lightning's name of the precision that ``trainer.precision`` stands for on ``device``.

    A CPU trains in float32: where it has no unit for bfloat16, that is slower by far.
    """
    if name == "auto":
        return "bf16-mixed" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    return name
