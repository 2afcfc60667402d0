"""The target of a job: found or built, and loaded when something needs the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from fovea.app.devices import DTYPES, decoding_dtype
from fovea.app.settings import Settings
from fovea.app.typed import SettingError
from fovea.targets.checkpoint import resolve_checkpoint
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_target
from fovea.targets.vision import load_vision


def require_target(model: DictConfig) -> None:
    """Refuses a target that is neither here nor can be built, before anything expensive."""
    if model.dtype not in (*DTYPES, "auto"):
        raise SettingError(f"model.dtype is {model.dtype!r}; choose from: {', '.join(DTYPES)}, auto")
    if model.path is not None or (model.build is None and not model.download):
        resolve_checkpoint(model.path, model.hub_id, model.revision)


def require_eyes(model: DictConfig, settings: Settings) -> None:
    """Refuses to make visual tokens again with a target whose sizes in the settings say that it reads text only."""
    sizes = model.get("architecture")
    if settings.export.visual == "recomputed" and sizes is not None and not sizes.get("vision_parameters", 0):
        raise SettingError(
            f"data.export.visual=recomputed runs the target's vision tower again, and {model.name} has none: it reads "
            "text only; use data.export.visual=stored"
        )


def find_target(cfg: DictConfig, recipe: Any) -> Path:
    """Checkpoint folder of the target: the one named, else what ``recipe`` builds into the cache, else the hub's."""
    model = cfg.model
    if model.path is None and recipe is not None:
        return recipe.build(Path(cfg.paths.cache).expanduser())
    return resolve_checkpoint(model.path, model.hub_id, model.revision, download=model.download)


def name_target(model: DictConfig, checkpoint: Path) -> dict[str, str]:
    """What results call the target in the folder ``checkpoint``: its name, and its revision where that is known.

    The name is that of its hub repository, of a recipe's target, or of its folder; no more of the path is told.
    """
    folder = checkpoint.resolve()
    if folder.parent.name == "snapshots":  # of the hub's cache: models--<owner>--<name>/snapshots/<commit>
        repository = folder.parents[1].name.removeprefix("models--").replace("--", "/")
        return {"target_name": repository, "target_revision": folder.name}
    return {"target_name": model.name if model.path is None else folder.name}


def loader(checkpoint: Path, dtype: str, device: torch.device, *, to_device: bool) -> Callable[[], HFTarget]:
    """Loads the target in the format that ``dtype`` stands for on ``device``; it stays in host memory unless
    ``to_device``."""
    place = device if to_device else torch.device("cpu")
    return lambda: load_target(checkpoint, device=place, dtype=decoding_dtype(dtype, device))


def vision_loader(checkpoint: Path, dtype: str) -> Callable[[torch.device], HFTarget]:
    """Loads what the target sees with onto a device, in the format that ``dtype`` stands for there."""
    return lambda device: load_vision(checkpoint, device=device, dtype=decoding_dtype(dtype, device))


def live_loader(checkpoint: Path, dtype: str, device: torch.device) -> Callable[[], HFTarget]:
    """As :func:`loader`, for a target that stays on ``device`` while a job runs: all who ask get the same one."""
    return partial(_live_target, checkpoint, decoding_dtype(dtype, device), device)


@lru_cache(maxsize=1)
def _live_target(checkpoint: Path, dtype: torch.dtype, device: torch.device) -> HFTarget:
    return load_target(checkpoint, device=device, dtype=dtype)
