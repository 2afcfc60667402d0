"""What a run depends on, as short digests: its settings, and the code that does the work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from fovea.app.launch import composed
from fovea.app.typed import convert

ROOT = Path(__file__).resolve().parents[2]
#: Code that decides what a trained drafter is, and what is measured of it; reports and trackers do neither.
TRAINING_CODE = ("datamodules", *(f"fovea/{n}" for n in ("artifacts", "drafters", "targets", "training", "visual")))
MEASURING_CODE = (
    "datamodules",
    "fovea/evaluation",
    *(f"fovea/{n}" for n in ("decoding", "drafters", "targets", "visual")),
)
#: Folders and files among them that only show figures.
_SHOWS = {"page", "papers", "style.py", "table.py"} | {
    f"{prefix}{name}.py" for prefix in ("", "budget_", "published_") for name in ("plots", "report")
}
#: Settings that say where things lie, what they are called, and who is told.
_ASIDE = ("callbacks", "checkpoints", "ckpt", "init_from", "logger", "name", "page", "paths", "resume", "tags")
#: Those of how the same artifacts are written and read.
_CARRIED_OUT = {
    "data.export.writer",
    *(f"data.loader.{name}" for name in ("threads", "checksums", "retries", "timeout")),
}
#: Those of measuring, which a training that measures nothing has no use for.
_MEASURING = ("benchmark", "speed")
_DIGITS = 12


def settings_digest(config_name: str, overrides: Sequence[str], *made_from: str) -> str:
    """Hex digits over the composed settings of a run, folders and names left out.

    A change of a file under ``conf`` changes it as a typed one does.

    Args:
        config_name: train or evaluate.
        overrides: as on the command line.
        made_from: digests of what the run starts from, such as its checkpoint.

    Raises:
        hydra.errors.HydraException: an override cannot be used.
    """
    text = json.dumps([config_name, _settings(config_name, tuple(overrides)), *made_from])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@cache
def _settings(config_name: str, overrides: tuple[str, ...]) -> str:
    cfg = composed(config_name, overrides)
    for name in cfg.paths:
        OmegaConf.update(cfg, f"paths.{name}", f"<{name}>")
    for name in _CARRIED_OUT:
        if OmegaConf.select(cfg, name) is not None:
            OmegaConf.update(cfg, name, None)
    plain = {str(k): v for k, v in OmegaConf.to_container(cfg, resolve=True).items()}  # type: ignore[union-attr]
    measures = config_name == "evaluate" or convert(plain["speed_eval"], bool, "speed_eval")
    aside = _ASIDE if measures else (*_ASIDE, *_MEASURING)
    return json.dumps({k: v for k, v in plain.items() if k not in aside}, sort_keys=True, default=str)


@cache
def code_digest(folders: tuple[str, ...], root: Path = ROOT) -> str:
    """Hex digits over the Python files below ``folders``, by their places and contents."""
    found = hashlib.sha256()
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root)
            if not _SHOWS & set(place.parts):
                found.update(f"{place.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:_DIGITS]
