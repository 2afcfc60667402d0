"""The target of a job: found or built, and loaded when something needs the whole of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from fovea.app.typed import SettingError
from fovea.targets.checkpoint import resolve_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_target(model: DictConfig) -> None:
    """Refuses a target that is neither here nor can be had, before anything expensive."""
    if model.dtype not in (*DTYPES, "auto"):
        raise SettingError(f"model.dtype is {model.dtype!r}; choose from: {', '.join(DTYPES)}, auto")
    if model.path is not None or (model.build is None and not model.download):
        resolve_checkpoint(model.path, model.hub_id, model.revision)


def find_target(model: DictConfig, recipe: Any, cache: Path) -> Path:
    """Checkpoint folder of the target: the one named, else the one that ``recipe`` builds into ``cache``, else the
    hub's."""
    if model.path is None and recipe is not None:
        from fovea.targets.tiny import build

        return build(recipe, cache)
    return resolve_checkpoint(model.path, model.hub_id, model.revision, download=model.download)


def decoding_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The number format that ``model.dtype`` stands for on ``device``."""
    if name == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return DTYPES[name]
