"""An export over several processes: nothing done twice or left out, however many there are and whenever they end."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fovea.artifacts.background import Background
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import export
from fovea.artifacts.manifest import MANIFEST, Manifest, ShardEntry
from fovea.artifacts.progress import ExportProgress
from fovea.artifacts.ranks import rank_in, shared_by
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.writer import ArtifactWriter

SCRIPT = Path(__file__).parent / "export_script.py"


def start(folder, pause, writer, **environment):
    command = [sys.executable, str(SCRIPT), str(folder), "30", str(pause), writer]
    paths = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | paths | environment)


def stored(folder):
    """How often each key is in a whole shard."""
    indexes = (
        json.loads(path.read_text()) for path in folder.glob("shard-*.json") if path.with_suffix(".tar").exists()
    )
    return Counter(sample["key"] for index in indexes for sample in index["shard"]["samples"])


def test_two_processes_then_three(tmp_path, fingerprint, config, fake_target, make_conversation, assert_same):
    """One of two is killed, the other one ends; three take up what is left; again does nothing."""
    first = start(tmp_path, 0.05, "process", RANK="0", WORLD_SIZE="2")
    second = start(tmp_path, 0.3, "thread", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("shard-01-*.tar")):
        assert second.poll() is None, second.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    errors = first.communicate()[1]
    assert first.returncode == 0, errors
    assert {key for key in stored(tmp_path) if int(key[2:]) % 2 == 0} == {f"k.{i}" for i in range(0, 30, 2)}
    assert not (tmp_path / MANIFEST).exists()

    conversations = [make_conversation(f"k.{i}") for i in range(30)]
    left = 30 - len(stored(tmp_path))
    assert 0 < left < 15
    targets = [fake_target() for _ in range(3)]
    done = [
        export(target, conversations, tmp_path, config, fingerprint, progress=False, rank=rank, world_size=3)
        for rank, target in enumerate(targets)
    ]
    assert [manifest is None for manifest in done] == [True, True, False]
    assert sum(sum(target.batches) for target in targets) == left
    assert set(stored(tmp_path).values()) == {1}
    artifacts = open_artifacts(tmp_path)
    artifacts.verify()
    assert sorted(s.key for s in artifacts) == sorted(c.key for c in conversations)
    for found in artifacts:
        assert_same(found, *fake_target().teach([fake_target().encode(make_conversation(found.key))], (1,)))
    assert not [*tmp_path.glob(".shard-*"), *tmp_path.glob(".pace-*")]

    again = fake_target()
    assert export(again, conversations, tmp_path, config, fingerprint, progress=False, rank=4, world_size=5) == done[2]
    assert not again.batches


def test_all_ranks_at_once(tmp_path, conversations, config, fingerprint, fake_target):
    targets = [fake_target() for _ in range(4)]
    threads = [
        threading.Thread(
            target=export,
            args=(target, conversations, tmp_path, config, fingerprint),
            kwargs={"progress": False, "rank": rank, "world_size": 4},
        )
        for rank, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sum(target.batches) for target in targets) == [2, 2, 3, 3]
    assert sorted(s.key for s in open_artifacts(tmp_path)) == sorted(c.key for c in conversations)


def test_what_was_deleted_is_missing_until_it_is_made_again(tmp_path, conversations, config, fingerprint, fake_target):
    settings = {"progress": False, "world_size": 2}
    for rank in range(2):
        export(fake_target(), conversations, tmp_path, config, fingerprint, rank=rank, **settings)
    (tmp_path / MANIFEST).unlink()
    for path in tmp_path.glob("shard-01-00000.*"):
        path.unlink()
    assert export(fake_target(), conversations, tmp_path, config, fingerprint, rank=0, **settings) is None
    assert len(export(fake_target(), conversations, tmp_path, config, fingerprint, rank=1, **settings)) == 10


def test_a_sample_in_two_shards_is_told(tmp_path, conversations, config, fingerprint, fake_target):
    export(fake_target(), conversations, tmp_path, config, fingerprint, progress=False)
    (tmp_path / MANIFEST).unlink()
    made_with, shard = ShardEntry.read(tmp_path / "shard-00-00000.json")
    replace(shard, name="shard-07-00000.tar").write(tmp_path, made_with)
    shutil.copy(tmp_path / shard.name, tmp_path / "shard-07-00000.tar")
    with pytest.raises(
        ArtifactError, match=r"'v1.5/a' is in shard-00-00000.tar and in shard-07-00000.tar of .* --drop"
    ):
        export(fake_target(), conversations, tmp_path, config, fingerprint, progress=False)


def test_skipped_ones_are_missing_to_nobody(
    tmp_path, conversations, config, fingerprint, fake_target, make_conversation
):
    items = [*conversations, make_conversation("empty", answer="")]
    for world_size in (2, 3):  # of the first two, one never came
        for rank in range(world_size):
            if (rank, world_size) != (1, 2):
                done = export(
                    fake_target(),
                    items,
                    tmp_path,
                    config,
                    fingerprint,
                    progress=False,
                    rank=rank,
                    world_size=world_size,
                )
    assert (len(done), set(done.skipped)) == (10, {"empty"})


def test_other_numbers_of_ranks_wait_for_each_other(tmp_path, caplog):
    entered = []

    def other():
        with shared_by(tmp_path, 3):
            entered.append(3)

    with shared_by(tmp_path, 2), shared_by(tmp_path, 2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert not entered
    thread.join(10)
    assert entered == [3]
    assert "2 ranks export to" in caplog.text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}, (5, 6, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 2, 0)),
        # A shell that srun has opened in a job of four tasks.
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, (0, 1, 0)),
        ({"WORLD_SIZE": "4"}, (0, 1, 0)),
    ],
)
def test_ranks_of_launchers(environment, expected):
    assert rank_in(environment) == expected


@pytest.mark.parametrize(
    ("tasks", "told"), [({}, False), ({"SLURM_NTASKS": "1"}, False), ({"SLURM_NTASKS": "4"}, True)]
)
def test_the_script_of_a_slurm_job_is_alone(tasks, told, caplog):
    """Without srun nobody else comes, however many tasks the job may have."""
    assert rank_in({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | tasks) == (0, 1, 0)
    assert ("works alone, not as one of the 4 tasks of its SLURM job: srun starts as many" in caplog.text) == told


def test_ranks_that_cannot_be(tmp_path, conversations, config, fingerprint, fake_target):
    with pytest.raises(ArtifactError, match=r"RANK=1 is in the environment and WORLD_SIZE is not; set both"):
        rank_in({"RANK": "1"})
    with pytest.raises(ArtifactError, match="no rank 2 among 2"):
        export(fake_target(), conversations, tmp_path, config, fingerprint, rank=2, world_size=2)


class TestStoringBesideTeaching:
    def test_the_target_does_not_wait(self, tmp_path, conversations, config, fingerprint, fake_target, monkeypatch):
        """Nothing is stored before the third batch has been taught."""
        taught, write = threading.Semaphore(0), ArtifactWriter.write

        def late(self, *arguments):
            assert all(taught.acquire(timeout=30) for _ in range(3))
            taught.release(3)
            write(self, *arguments)

        monkeypatch.setattr(ArtifactWriter, "write", late)
        manifest = export(
            fake_target(lambda _: taught.release()), conversations, tmp_path, config, fingerprint, progress=False
        )
        assert [s.key for s in manifest.samples()] == [c.key for c in conversations]

    def test_what_waits_is_bounded(self):
        gate, given, done = threading.Event(), [], []

        def work(item):
            gate.wait(30)
            done.append(item)

        def give():
            with Background(work, waiting=2) as storing:
                for item in range(10):
                    storing.put(item)
                    given.append(item)

        thread = threading.Thread(target=give)
        thread.start()
        thread.join(0.3)
        assert len(given) == 3  # one at work, two waiting
        gate.set()
        thread.join(30)
        assert done == list(range(10))

    def test_a_full_disk_stops_the_export_in_one_sentence(
        self, tmp_path, conversations, config, fingerprint, fake_target, monkeypatch
    ):
        start_shard, target = ArtifactWriter._start_shard, fake_target()

        def full(self):
            start_shard(self)
            if self._number == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(ArtifactWriter, "_start_shard", full)
        with pytest.raises(ArtifactError, match=r"cannot be written to .*No space left on device.*resumes"):
            export(target, conversations, tmp_path, config, fingerprint, progress=False)
        monkeypatch.undo()
        whole = len(stored(tmp_path))
        assert 0 < whole < len(conversations)
        resumed = fake_target()
        export(resumed, conversations, tmp_path, config, fingerprint, progress=False)
        assert sum(resumed.batches) == len(conversations) - whole
        assert len(Manifest.read(tmp_path)) == len(conversations)

    def test_a_sample_that_cannot_be_stored_stops_it(self, tmp_path, conversations, config, fingerprint, fake_target):
        target = fake_target()
        teach = target.teach
        target.teach = lambda *arguments: [replace(s, last=s.last * float("nan")) for s in teach(*arguments)]
        with pytest.raises(ArtifactError, match=r"'v1.5/a': the target's 'last' states hold non-finite"):
            export(target, conversations, tmp_path, config, fingerprint, progress=False)
        assert not (tmp_path / MANIFEST).exists()

    def test_its_error_comes_out_at_the_end_too(self):
        def work(item):
            raise ArtifactError(f"no {item}")

        with pytest.raises(ArtifactError, match="no 1"), Background(work, waiting=4) as storing:
            storing.put(1)
        with pytest.raises(KeyboardInterrupt), Background(work, waiting=1):
            raise KeyboardInterrupt


def test_the_pace_of_all_ranks(tmp_path, monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    caplog.set_level(logging.INFO)
    first, second = (ExportProgress(tmp_path, rank, 2, total=100, done=10 * rank, shown=True) for rank in (0, 1))
    with first.shown(), second.shown():
        now[0] += 10
        second.advance(20, 3_000_000_000)
        first.advance(10, 1_000_000_000)
        assert first.summary() == (40, "3.0/s, 4.00 GB, about 0:00:20 left, 2 of 2 ranks at work")
        assert not caplog.text
        second.end(4_000_000_000)
        now[0] += 60
        first.advance(25, 2_000_000_000)
        # 35 in 70 s, and 35 are left; the other rank is done and gives no more.
        assert (
            "export: 65 of 100 conversations, 0.5/s, 6.00 GB, about 0:01:10 left, 1 of 2 ranks at work" in caplog.text
        )
        now[0] += 400
        assert first.summary() == (65, "0.0/s, 6.00 GB, 0 of 2 ranks at work")


def test_shards_of_ranks_do_not_meet(tmp_path, conversations, fingerprint, fake_target):
    config = ExportConfig(mid_layers=(1, 2), answers="dataset", batch_size=1, shard_bytes=1)
    for rank in (1, 0):
        export(fake_target(), conversations, tmp_path, config, fingerprint, progress=False, rank=rank, world_size=2)
    names = [shard.name for shard in Manifest.read(tmp_path).shards]
    assert names == [f"shard-{rank:02d}-{number:05d}.tar" for rank in range(2) for number in range(5)]
