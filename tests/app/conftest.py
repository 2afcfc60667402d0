"""Runs of the entry points on a small random target and a dozen conversations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / script), *overrides]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that still work for a job in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            at = os.readlink(path.with_name("cwd"))
        except OSError:
            continue
        if int(path.parent.name) != os.getpid() and (str(folder) in command or at == str(folder)):
            found.append(command)
    return found


@pytest.fixture(scope="module")
def workplace(small_target_path, tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with twelve conversations, ten of them about pictures, and the overrides of a job on them."""
    folder = tmp_path_factory.mktemp("whole_job")
    with (folder / "conversations.jsonl").open("w") as stream:
        for number in range(12):
            Image.new("RGB", (84 + 28 * (number % 3), 84), (20 * number, 90, 160)).save(folder / f"{number}.png")
            images = [f"{number}.png"] if number < 10 else []
            question = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"what is it? {number}"}]
            record = {"key": f"k.{number}", "messages": [{"role": "user", "content": question}]}
            stream.write(json.dumps(record | {"images": images, "source": "ab"[number % 2]}) + "\n")
    return folder, [
        f"model.path={small_target_path}",
        "model.mid_layers=[1,2]",
        "model.drafter_blocks=1",
        "model.correction_width=16",
        "data=jsonl",
        "data.path=conversations.jsonl",
        "data.heldout_path=conversations.jsonl",
        "data.export.max_new_tokens=8",
        "data.loader.num_workers=0",
        "data.loader.batch_size=4",
        "decode.max_new_tokens=8",
        "speed.prompts=2",
        "speed.prompts_per_epoch=2",
        "speed.warmup_prompts=0",
        "speed.transformers_prompts=1",
        "scheduler.warmup_steps=1",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=false",
        "trainer.log_every_n_steps=1",
        f"paths.cache={folder / 'cache'}",
    ]


@pytest.fixture(scope="module")
def trained(workplace) -> Path:
    """Folder of a run of two epochs with all that a user gets, W&B offline among it."""
    folder, overrides = workplace
    done = run("train.py", folder, *overrides, "trainer.max_epochs=2", "data.export.writer=process", "name=first")
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout
    return only(folder, "outputs/*/*-first")
