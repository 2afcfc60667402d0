"""The weights of a drafter as a safetensors file that says whether it is still what was written."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that is not what it is loaded as."""


def write_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Writes contiguous ``weights``, on the CPU, with their checksum; equal weights give equal bytes."""
    # A single entry: several are stored in an order that changes from run to run.
    save_file(weights, path, metadata={"crc": f"{_crc(weights):08x}"})


def _crc(weights: Mapping[str, Tensor], *, types: bool = True) -> int:
    """CRC-32 of names, types, shapes and contents, by name; ``types``: without it older versions left them out."""
    found = 0
    for name in sorted(weights):
        told = f"{name} {weights[name].dtype} {tuple(weights[name].shape)}" if types else name
        content = weights[name].contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(content.numpy().data, zlib.crc32(told.encode(), found))
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in ``path``, checked against their checksum; older checkpoints have none.

    Raises:
        CheckpointError: the file is cut or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            crc = (file.metadata() or {}).get("crc")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is cut or damaged ({error}); copy the drafter again") from error
    if crc is not None and (found := f"{_crc(stored):08x}") != crc and f"{_crc(stored, types=False):08x}" != crc:
        raise CheckpointError(
            f"{path} is damaged: the CRC-32 of its weights is {found}, and it says {crc}; copy the drafter again"
        )
    return stored
