"""A disk that is full, a small tmpfs: one sentence, and once there is room the same command goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fovea.app.resumable import require_checkpoint
from fovea.artifacts.reading import open_artifacts
from tests.app.conftest import ROOT, run

SIZE = 16 * 2**20


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    """A disk of 16 MiB."""
    place = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, left: int) -> Path:
    """A file that leaves ``left`` bytes of the disk."""
    file, free = disk / "filler", os.statvfs(disk)
    file.write_bytes(bytes(free.f_bavail * free.f_frsize - left))
    return file


def told(done: subprocess.CompletedProcess, *words: str) -> None:
    """Asserts that a job ended with the sentence alone, which has ``words`` in it."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    for part in ("No space left on device", "make room", *words):
        assert part in last, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_an_export(workplace, small_target_path, disk, writer):
    folder, _ = workplace
    out = disk / writer
    words = f"--target {small_target_path} --out {out} --mid-layers 1 2 --dtype fp32 --max-new-tokens 8 --batch-size 2"
    words += f" --shard-bytes 20000 --writer {writer} --data datamodules.conversations:JsonlConversations"
    command = [sys.executable, "-m", "fovea.artifacts.export", *words.split(), f"path={folder / 'conversations.jsonl'}"]
    settings = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    filler = fill(disk, 100_000)
    done = subprocess.run(command, timeout=300, **settings)
    told(done, str(out), "resumes")
    whole = {path.name for path in out.glob("shard-*.json")}
    assert whole
    filler.unlink()
    done = subprocess.run(command, timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    artifacts = open_artifacts(out)
    artifacts.verify()
    assert sorted(entry.key for entry in artifacts.entries) == sorted(f"k.{number}" for number in range(12))
    assert whole < {path.name for path in out.glob("shard-*.json")}


@pytest.mark.whole
def test_a_training(workplace, disk):
    folder, overrides = workplace
    out = disk / "run"
    words = [*overrides, "speed_eval=off", "logger=csv", "resume=own", f"hydra.run.dir={out}"]
    done = run("train.py", folder, *words, "trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    filler = fill(disk, 100_000)
    done = run("train.py", folder, *words, "trainer.max_epochs=2")
    told(done, "no room for", "last.ckpt")
    require_checkpoint(out / "checkpoints" / "last.ckpt")  # that of the first epoch
    assert torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 0
    filler.unlink()
    done = run("train.py", folder, *words, "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1


@pytest.mark.whole
def test_an_evaluation(workplace, disk):
    """There is room for a few answers."""
    folder, overrides = workplace
    out = disk / "evaluation"
    words = [*overrides, "method=pld", "speed.prompts=12", "decode.max_new_tokens=60", "logger=csv"]
    filler = fill(disk, 120_000)
    done = run("evaluate.py", folder, *words, f"hydra.run.dir={out}")
    told(done, "no room for")
    answered = (out / "evaluation" / "final" / ".answers-00-of-01.jsonl").read_bytes().count(b"\n") - 1
    assert answered > 0
    filler.unlink()
    done = run("evaluate.py", folder, *words, f"hydra.run.dir={out}")
    assert done.returncode == 0, done.stderr
    settings = json.loads((out / "evaluation" / "final" / "evaluation.json").read_text())["settings"]
    assert settings["answers_before_resuming"] == answered
