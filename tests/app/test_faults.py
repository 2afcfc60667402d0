"""Runs from the outside where clusters fail: full disks, ranks that die, folders that move, damaged checkpoints."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fovea.app.resumable import require_checkpoint
from fovea.app.typed import SettingError
from tests.app.conftest import ROOT, only, run

TRAIN = ["trainer.max_epochs=2", "speed_eval=off", "logger=csv", "callbacks.checkpoint.every_n_steps=1"]


@pytest.fixture(scope="module")
def trained(workplace) -> Path:
    folder, overrides = workplace
    done = run("train.py", folder, *overrides, *TRAIN, "name=first")
    assert done.returncode == 0, done.stderr
    return only(folder, "outputs/*/*-first")


def limited(folder: Path, most_bytes: int, *words: str) -> subprocess.CompletedProcess:
    """A job none of whose files may grow beyond ``most_bytes``, as under a quota."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, preexec_fn=limit)


@pytest.mark.slow
def test_a_full_disk_is_told_in_words(trained, workplace):
    folder, overrides = workplace
    size = (trained / "checkpoints" / "last.ckpt").stat().st_size
    script, words = str(ROOT / "train.py"), [*overrides, *TRAIN, "trainer.max_epochs=3"]
    done = limited(folder, size // 2, script, *words, "name=full")
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert "no room for" in told
    assert "last.ckpt" in told
    assert "File too large" in told
    assert "make room" in told
    assert "Traceback" not in done.stderr
    full = only(folder, "outputs/*/*-full")
    assert not (full / "checkpoints" / "last.ckpt").exists()


@pytest.mark.whole
def test_what_was_there_before_a_disk_was_full_is_sound(trained, workplace):
    folder, _ = workplace
    size, script = (trained / "checkpoints" / "last.ckpt").stat().st_size, str(ROOT / "train.py")
    done = limited(folder, size // 2, script, f"resume={trained}", "trainer.max_epochs=3", "name=again")
    assert done.returncode == 1
    require_checkpoint(trained / "checkpoints" / "last.ckpt")  # what was there before is sound
    assert run("train.py", folder, f"resume={trained}", "trainer.max_epochs=3", "name=later").returncode == 0


@pytest.mark.whole
def test_a_run_folder_goes_on_where_it_was_moved_to(trained, workplace, tmp_path):
    folder, _ = workplace
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(trained, moved)
    hidden = trained.rename(trained.with_name("hidden"))
    try:
        done = run("train.py", folder, f"resume={moved}", "trainer.max_epochs=3", "name=moved")
    finally:
        hidden.rename(trained)
    assert done.returncode == 0, done.stderr
    again = only(folder, "outputs/*/*-moved")
    assert torch.load(again / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 2
    done = run("train.py", folder, f"resume={trained}", "trainer.max_epochs=3", "name=stayed")
    assert done.returncode == 0, done.stderr
    for name in ("drafter", "drafter_best"):
        one, other = (only(folder, f"outputs/*/*-{run}") / name / "model.safetensors" for run in ("moved", "stayed"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.whole
def test_a_run_that_was_over_leaves_its_drafter_when_it_is_resumed(trained, workplace):
    """Killed behind its last step, say, while its drafter was being exported."""
    folder, _ = workplace
    done = run("train.py", folder, f"resume={trained}", "name=over")
    assert done.returncode == 0, done.stderr
    again = only(folder, "outputs/*/*-over")
    for name in ("drafter", "drafter_best"):
        weights = Path(name) / "model.safetensors"
        assert (again / weights).read_bytes() == (trained / weights).read_bytes()
    assert run("train.py", folder, f"resume={again}", "trainer.max_epochs=3", "name=longer").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("dying", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_a_rank_that_dies_ends_the_job_within_a_minute(workplace, dying):
    """Two gloo ranks of one training, started as torchrun does it; one is killed behind its first checkpoint."""
    folder, overrides = workplace
    out = folder / f"ranks-{dying}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    words = [*overrides, *TRAIN, "trainer.max_epochs=1000", "trainer.devices=2", "trainer.strategy=ddp"]
    words = ["+trainer.strategy=ddp" if word == "trainer.strategy=ddp" else word for word in words]
    ranks = []
    for rank in range(2):
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)}
        env |= {"TORCHELASTIC_RUN_ID": "drill", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={out}"]
        log = (folder / f"rank-{dying}-{rank}.log").open("w")
        ranks.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoints" / "last.ckpt").is_file():
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks), (folder / f"rank-{dying}-1.log").read_text()
            time.sleep(0.05)
        ranks[dying].send_signal(signal.SIGKILL)
        code = ranks[1 - dying].wait(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = (folder / f"rank-{dying}-{1 - dying}.log").read_text()
    assert code == 1, told
    assert "another rank is gone" in told.splitlines()[-1], told
    assert "resume=" in told
    require_checkpoint(out / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def checkpoint(trained) -> bytes:
    return (trained / "checkpoints" / "last.ckpt").read_bytes()


def refused(raw: bytes, path: Path) -> str | None:
    path.write_bytes(raw)
    try:
        require_checkpoint(path)
    except SettingError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_checkpoints_cut_or_flipped_anywhere(checkpoint, tmp_path):
    """A flipped bit is noticed unless it lies in padding, which holds nothing."""
    path, draw = tmp_path / "last.ckpt", random.Random(0)
    right = torch.load(tmp_path.joinpath("right.ckpt").write_bytes(checkpoint) and tmp_path / "right.ckpt")
    for length in [0, 1, 100, *(draw.randrange(len(checkpoint)) for _ in range(12)), len(checkpoint) - 1]:
        assert "last.ckpt is" in refused(checkpoint[:length], path)
    noticed = 0
    for _ in range(40):
        raw = bytearray(checkpoint)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        if refused(bytes(raw), path) is None:
            found = torch.load(path, weights_only=True)
            assert all(
                torch.equal(found["state_dict"][name], right["state_dict"][name]) for name in found["state_dict"]
            )
        else:
            noticed += 1
    assert noticed > 20


@pytest.mark.slow
def test_what_is_no_checkpoint_is_refused_before_anything_else(trained, workplace, tmp_path):
    folder, _ = workplace
    copied = tmp_path / "run"
    shutil.copytree(trained, copied)
    raw = (copied / "checkpoints" / "last.ckpt").read_bytes()
    (copied / "checkpoints" / "last.ckpt").write_bytes(raw[: len(raw) // 2])
    done = run("train.py", folder, f"resume={copied}", "name=cut")
    assert done.returncode == 1
    assert "last.ckpt is cut, damaged or no checkpoint" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    torch.save({"state_dict": {}}, copied / "checkpoints" / "last.ckpt")
    with pytest.raises(SettingError, match="it lacks callbacks, drafter, global_step"):
        require_checkpoint(copied / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_drafters_cut_or_flipped_anywhere(trained, small_target, tmp_path):
    from fovea.drafters.checkpoint import CheckpointError, load_drafter

    copied, draw = tmp_path / "drafter", random.Random(3)
    shutil.copytree(trained / "drafter", copied)
    right = load_drafter(copied, small_target.head, small_target.spec)
    file = copied / "model.safetensors"
    raw = file.read_bytes()
    with safe_open(file, framework="pt") as held:
        assert list(held.metadata()) == ["crc"]
    for attempt in range(60):
        damaged = bytearray(raw)
        damaged[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged if attempt % 4 else damaged[: draw.randrange(len(raw))])
        with pytest.raises(CheckpointError, match=r"model.safetensors"):
            load_drafter(copied, small_target.head, small_target.spec)
    file.write_bytes(raw)
    config = copied / "config.json"
    text, told = config.read_bytes(), list[str]()
    for _ in range(60):
        damaged = bytearray(text)
        damaged[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        config.write_bytes(damaged)
        try:
            found = load_drafter(copied, small_target.head, small_target.spec)
        except ValueError as error:
            # Raised by our own code: it says what does not fit.
            told.append(traceback.extract_tb(error.__traceback__)[-1].filename)
            continue
        for name, weight in found.state_dict().items():
            assert torch.equal(weight, right.state_dict()[name])
    assert len(told) > 20
    assert all(Path(name).is_relative_to(ROOT / "fovea") for name in told), told


@pytest.mark.whole
def test_an_evaluation_is_resumed_by_its_folder(trained, workplace):
    """One that was killed behind its first answer, then one that was completed."""
    folder, _ = workplace
    out, asked = folder / "cut-evaluation", [f"ckpt={trained}", "decode.max_new_tokens=6", "speed.prompts=4"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "evaluate.py"), *asked, "logger=csv", f"hydra.run.dir={out}"]
    journal = out / "evaluation" / "final" / ".answers-00-of-01.jsonl"
    with (folder / "cut.log").open("w") as log:
        job = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 240
        while not journal.is_file() or journal.read_bytes().count(b"\n") < 2:
            assert job.poll() is None, (folder / "cut.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.killpg(job.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
    done = run("evaluate.py", folder, f"resume={out}", "decode.max_new_tokens=7", "name=other")
    assert done.returncode == 1
    assert "max_new_tokens was 6 and is 7" in done.stderr.splitlines()[-1]
    done = run("evaluate.py", folder, f"resume={out}", "name=resumed")
    assert done.returncode == 0, done.stderr
    assert "answers_before_resuming" in (only(folder, "outputs/*/*-resumed") / "report.md").read_text()
    done = run("evaluate.py", folder, f"resume={only(folder, 'outputs/*/*-resumed')}", "name=never")
    assert done.returncode == 1
    assert "was completed" in done.stderr.splitlines()[-1]
    done = run("evaluate.py", folder, f"resume={trained}", "name=no")
    assert "holds no evaluation to resume" in done.stderr.splitlines()[-1]
