"""Where a run comes from: commit, versions, machine, command line and fingerprints, written beside its results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only

from fovea.drafters.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from fovea.files import write_text

#: In the folder of a run; below it the records of calls that it went on from, and what it was made of.
FILE, EARLIER, FINGERPRINTS = "provenance.json", "earlier", "fingerprints"

PACKAGES = (
    "fovea",
    "torch",
    "torchvision",
    "lightning",
    "transformers",
    "hydra-core",
    "omegaconf",
    "webdataset",
    "wandb",
    "torchmetrics",
    "safetensors",
    "numpy",
)


def provenance() -> dict[str, Any]:
    """The record as plain types; ``commit`` and ``dirty`` are None outside a git checkout."""
    import torch

    commit, dirty = _checkout(Path(__file__).resolve().parents[2])
    return {
        "commit": commit,
        "dirty": dirty,
        "command": _command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def write_provenance(folder: Path) -> None:
    """Writes ``provenance.json`` into ``folder``; that of a call which this one goes on from stays in it, in a list."""
    folder.mkdir(parents=True, exist_ok=True)
    record = provenance()
    if (before := _read(folder)) is not None:
        record[EARLIER] = [*before.pop(EARLIER, []), before]
    write_text(folder / FILE, json.dumps(record, indent=2) + "\n")


@rank_zero_only
def note_fingerprints(folder: Path, **found: Any) -> None:
    """Adds what the run in ``folder`` depends on, such as the hash of its target's weights, in plain types."""
    record = _read(folder) or {}
    record[FINGERPRINTS] = {**record.get(FINGERPRINTS, {}), **found}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, json.dumps(record, indent=2) + "\n")


@rank_zero_only
def note_drafter(folder: Path, drafter: Path) -> None:
    """Adds which drafter, of the folder ``drafter``, the run in ``folder`` measures."""
    note_fingerprints(folder, drafter=identity_of_drafter(drafter))


def identity_of_drafter(folder: Path) -> dict[str, Any]:
    """What tells the exported drafter in ``folder`` from others: a hash of its weights, and its origin; plain types."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = json.loads((folder / CONFIG_FILE).read_bytes())
    return {"folder": str(folder.absolute()), "weights": digest, "origin": record.get("origin", {})}


def _read(folder: Path) -> dict[str, Any] | None:
    """The record in ``folder``; None if there is none that can be read."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _command() -> str:
    """What a user would type for this run: workers of a sweep have a command line of their launcher."""
    words = sys.argv
    if HydraConfig.initialized():
        config = HydraConfig.get()
        words = [f"{config.job.name}.py", *config.overrides.task]
    return shlex.join([Path(sys.executable).name, *words])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _checkout(root: Path) -> tuple[str | None, bool | None]:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None
