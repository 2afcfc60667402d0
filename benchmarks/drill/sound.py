"""What must hold of every file that a killed job left under its own name: it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from PIL import Image
from safetensors import safe_open

from fovea.app.resumable import require_checkpoint
from fovea.evaluation.results import TRACES, SpeedResult


def unsound(folder: Path) -> list[str]:
    """Files below ``folder`` that are neither whole nor named as unfinished; what is wrong with each."""
    problems = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        try:
            _look(path)
        except Exception as error:  # whatever the readers of so many formats say
            problems.append(f"{path}: {error}")
    return problems


def _look(path: Path) -> None:
    if path.suffix == ".json":
        json.loads(path.read_bytes())
        shard = path.with_suffix(".tar")
        if path.name.startswith("shard-") and shard.is_file():
            wanted = json.loads(path.read_bytes())["shard"]["sha256"]
            if hashlib.sha256(shard.read_bytes()).hexdigest() != wanted:
                raise ValueError("another hash than that of its index")
    elif path.name == TRACES:
        SpeedResult.load(path.parent)
    elif path.suffix == ".jsonl" and path.parent.name == "final":
        for line in path.read_bytes().splitlines():
            json.loads(line)
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dictionary
                file.get_tensor(name)
    elif path.suffix == ".ckpt":
        require_checkpoint(path)
    elif path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
