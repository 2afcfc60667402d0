"""Where a run comes from: commit, versions, machine and command line, written beside its results."""

from __future__ import annotations

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

from fovea.files import write_text

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
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {name: _version(name) for name in PACKAGES},
    }


def write_provenance(folder: Path) -> None:
    """Writes ``provenance.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "provenance.json", json.dumps(provenance(), indent=2) + "\n")


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
