"""A run whose process is killed goes on with ``resume=`` to the same losses and weights, bit for bit.

So do the jobs of two ranks in a small run of ``python -m benchmarks.drill``, of which one is also killed alone.
"""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.app.conftest import ROOT, only, run

SETTINGS = [
    "trainer.max_epochs=4",
    "trainer.accumulate_grad_batches=2",
    "data.loader.batch_size=1",
    "data.loader.num_workers=2",
    "unroll.max_anchors=4",
    "callbacks.checkpoint.every_n_steps=1",
    "speed_eval=off",
    "logger=csv",
]


def killed(folder: Path, name: str, draw: random.Random, *overrides: str) -> Path:
    """Folder of a run that is killed, workers and all, some moment behind one of its first checkpoints."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"name={name}"]
    with (folder / f"{name}.log").open("w") as log:
        job = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    left, before, deadline = draw.randint(1, 6), None, time.monotonic() + 300
    while left and job.poll() is None and time.monotonic() < deadline:
        for checkpoint in folder.glob(f"outputs/*/*-{name}/checkpoints/last.ckpt"):
            now = checkpoint.stat().st_mtime_ns
            left, before = left - (now != before), now
        time.sleep(0.002)
    time.sleep(draw.random() * 0.1)
    os.killpg(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, (folder / f"{name}.log").read_text()
    return only(folder, f"outputs/*/*-{name}")


def losses(folder: Path) -> dict[int, str]:
    rows = csv.DictReader((folder / "metrics" / "metrics.csv").open())
    return {int(row["step"]): row["train/loss"] for row in rows if row["train/loss"]}


@pytest.mark.slow
def test_a_killed_run_is_resumed_bit_for_bit(workplace) -> None:
    folder, overrides = workplace
    done = run("train.py", folder, *overrides, *SETTINGS, "name=whole")
    assert done.returncode == 0, done.stderr
    whole = only(folder, "outputs/*/*-whole")
    assert len(losses(whole)) == 4 * 6  # eleven micro-batches, by two

    draw = random.Random(0)
    first = killed(folder, "first", draw, *overrides, *SETTINGS)
    second = killed(folder, "second", draw, f"resume={first}")
    done = run("train.py", folder, f"resume={second}", "name=third")
    assert done.returncode == 0, done.stderr
    third = only(folder, "outputs/*/*-third")
    assert 0 < len(losses(third)) < len(losses(whole))
    assert losses(third).items() <= losses(whole).items()
    assert max(losses(third)) == max(losses(whole))
    for weights in ("drafter/model.safetensors", "drafter_best/model.safetensors"):
        assert (third / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize(
    ("part", "kills"),
    [
        pytest.param("export", 5, marks=pytest.mark.slow),
        pytest.param("training", 4, marks=pytest.mark.whole),
        pytest.param("evaluation", 4, marks=pytest.mark.whole),
    ],
)
def test_jobs_of_two_ranks_survive_a_small_drill(part, kills, tmp_path) -> None:
    words = ["-m", "benchmarks.drill", "--part", part, "--ranks", "2", "--kills", str(kills), "--seed", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    name, killed, alone, ends = rows[2][:4]
    assert (name, int(killed)) == (f"{part}, 2 ranks", kills)
    assert 0 < int(alone) < kills
    assert int(ends) >= 1
    assert sum(int(row[5]) for row in rows[2:]) == kills
