"""Where a run comes from, for its checkpoints: they leave its folder, and must still say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import yaml

from datamodules.trained_on import place_of

#: Files of a run that say it.
PROVENANCE, CONFIG = "provenance.json", "config.yaml"
#: Where its conversations, or artifacts of them, lie.
TRAINED_ON = "trained_on"


@runtime_checkable
class Fingerprinted(Protocol):
    """Data that know what they depend on."""

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """For training and validation what their numbers depend on, in plain types."""
        ...


def origin(run: Path, trainer: L.Trainer) -> dict[str, Any]:
    """What :func:`lineage` gives, and the resolved configuration."""
    config = _config(run)
    return _lineage(run, trainer, config) | ({} if config is None else {"config": config})


def lineage(run: Path, trainer: L.Trainer) -> dict[str, Any]:
    """Commit, versions and command line, fingerprints of target and data, and where the data lie; plain types.

    What the folder ``run`` or the data do not say is missing.
    """
    return _lineage(run, trainer, _config(run))


def _lineage(run: Path, trainer: L.Trainer, config: dict[str, Any] | None) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if (run / PROVENANCE).is_file():
        record |= json.loads((run / PROVENANCE).read_text(encoding="utf-8"))
    if config is not None and (place := place_of(config.get("data", {}).get("train"))) is not None:
        record[TRAINED_ON] = place
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(data, Fingerprinted):
        record["fingerprints"] = {**record.get("fingerprints", {}), **data.fingerprints()}
    return record


def _config(run: Path) -> dict[str, Any] | None:
    path = run / CONFIG
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
