"""Trainings of two ranks on shards that cannot be split evenly: each sample once an epoch, equally many steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from fovea.artifacts.manifest import Manifest
from tests.app.conftest import ROOT, left_over, run

pytestmark = pytest.mark.whole

BROKEN = 4


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    """Twelve alike, of which one gives no sample: its picture is broken."""
    folder = tmp_path_factory.mktemp("uneven")
    with (folder / "c.jsonl").open("w") as stream:
        for number in range(12):
            Image.new("RGB", (84, 84), (20 * number, 90, 160)).save(folder / f"{number}.png")
            content = [{"type": "image"}, {"type": "text", "text": f"what is it? {number:02d}"}]
            record = {"key": f"k.{number}", "messages": [{"role": "user", "content": content}]}
            stream.write(json.dumps(record | {"images": [f"{number}.png"]}) + "\n")
    (folder / f"{BROKEN}.png").write_bytes(b"no picture")
    return folder / "c.jsonl"


def export(target: Path, conversations: Path, out: Path, shard_bytes: int, rank: int = 0, ranks: int = 1) -> None:
    words = f"--target {target} --out {out} --mid-layers 1 2 --dtype fp32 --max-new-tokens 8"
    words += f" --shard-bytes {shard_bytes} --data datamodules.conversations:JsonlConversations path={conversations}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "fovea.artifacts.export", *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def five_and_three(small_target_path, conversations) -> Path:
    """Five shards of the first rank with a sample each, three of the second one with two."""
    out = conversations.parent / "five_and_three"
    export(small_target_path, conversations, out, 1, rank=0, ranks=2)
    size = max(shard.stat().st_size for shard in out.glob("shard-00-*.tar"))
    export(small_target_path, conversations, out, int(2.4 * size), rank=1, ranks=2)
    shards = Manifest.read(out).shards
    assert [len(shard.samples) for shard in shards] == [1] * 5 + [2] * 3
    return out


@pytest.fixture(scope="module")
def one(small_target_path, conversations) -> Path:
    """A single shard of all."""
    out = conversations.parent / "one"
    export(small_target_path, conversations, out, 10**9)
    assert len(Manifest.read(out).shards) == 1
    return out


def train(workplace, out: Path, *words: str) -> subprocess.CompletedProcess:
    folder, overrides = workplace
    settings = [
        "data.loader.val_fraction=0",
        "data.loader.batch_size=2",
        "trainer.devices=2",
        "trainer.max_epochs=2",
        "speed_eval=off",
        "logger=csv",
        "+callbacks.watch._target_=benchmarks.drill.watch.Watch",
        f"+callbacks.watch.path={out}/steps.jsonl",
    ]
    return run("train.py", folder, *overrides, *settings, *words, f"hydra.run.dir={out}")


@pytest.mark.parametrize(
    ("shards", "door", "workers"),
    [
        ("five_and_three", "{folder}", 0),
        ("five_and_three", "pipe:cat {folder}/{{name}}", 0),
        ("five_and_three", "pipe:cat {folder}/{{name}}", 4),
        ("one", "{folder}", 4),
        ("one", "pipe:cat {folder}/{{name}}", 4),
    ],
)
def test_each_sample_comes_once_and_ranks_take_equally_many_steps(
    workplace, shards, door, workers, request, tmp_path
) -> None:
    """Of eleven samples each rank takes six, so one comes twice."""
    folder = request.getfixturevalue(shards)
    words = [
        f"data.train='{door.format(folder=folder)}'",
        f"data.loader.num_workers={workers}",
        "data.loader.threads=0",
    ]
    done = train(workplace, tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    keys = {f"k.{number}" for number in range(12)} - {f"k.{BROKEN}"}
    for epoch in range(2):
        batches = [[batch for at, batch, rank, *_ in steps if (at, rank) == (epoch, number)] for number in range(2)]
        assert batches[0] == batches[1] == list(range(len(batches[0])))
        seen = Counter(key for at, _, _, found, _ in steps if at == epoch for key in found)
        assert set(seen) == keys
        assert sorted(seen.values()) == [1] * 10 + [2]


@pytest.mark.parametrize("empty", ["training file", "validation file", "artifacts"])
def test_a_set_without_samples_is_told_in_a_sentence(workplace, one, empty, tmp_path):
    nothing = tmp_path / "nothing"
    if empty == "artifacts":
        nothing.mkdir()
        replace(Manifest.read(one), shards=()).write(nothing)
        words, said = [f"data.train={nothing}"], f"the artifacts in {nothing} hold no sample; export again"
    else:
        nothing.touch()
        val = f"data.val={{_target_:datamodules.conversations.JsonlConversations,path:{nothing}}}"
        words = [f"data.path={nothing}"] if empty == "training file" else [val]
        said = f"there is no conversation in {nothing}"
    done = train(workplace, tmp_path / "run", *words)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert any(line.startswith(said) for line in done.stderr.splitlines()), done.stderr
    assert not left_over(tmp_path)
