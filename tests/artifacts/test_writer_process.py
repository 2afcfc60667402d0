"""The process that writes: the bytes that a thread would write, and an end whichever of the two processes ends."""

import io
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import export
from fovea.artifacts.fingerprint import fingerprint_checkpoint
from fovea.artifacts.handover import receive, send, send_end
from fovea.artifacts.lesson import Lesson
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.progress import ExportProgress
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.writer import whole_shards
from fovea.artifacts.writer_process import WriterProcess

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "export_script.py"


@pytest.fixture
def apart(config):
    return replace(config, writer="process")


@pytest.fixture
def many(make_conversation):
    return [make_conversation(f"k.{number}") for number in range(40)]


@pytest.fixture
def started(monkeypatch):
    """Does with each writer process what it is given, as soon as the process is there; returns the processes."""
    start, processes = WriterProcess._start, []

    def watching(act):
        def started(self):
            processes.append(start(self))
            act(processes[-1])
            return processes[-1]

        monkeypatch.setattr(WriterProcess, "_start", started)
        return processes

    return watching


def plain(sample):
    """What ``sample`` holds, tensors as dtype, shape and bytes."""

    def of(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()
        return tuple(map(of, value)) if isinstance(value, tuple) else value

    return {name: of(value) for name, value in vars(sample).items()}


def await_(condition, process=None):
    """Waits until ``condition`` gives something, and returns it; fails if ``process`` ends before."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class TestHandover:
    def lesson(self, make_sample, **changes):
        sample = replace(make_sample("k", dtype=torch.float32), key="ünï \ud83d", **changes)
        return Lesson(sample, "ä", ((10, 20), (3, 4)), (b"one", bytes(300)))

    def test_all_of_a_lesson_arrives(self, make_sample):
        """Views, empty tensors and all that a sample may hold or lack."""
        last = torch.randn(16, 12, dtype=torch.float64).to(torch.bfloat16).T
        pictures = (torch.arange(7, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))
        features = {"features": torch.randn(12, 32), "feature_layers": (3, 1)}
        changes = ({}, {"last": last, "pictures": pictures}, features, {"importance": None, "pictures": ()})
        lessons = [self.lesson(make_sample, **change) for change in changes]
        stream = io.BytesIO()
        for lesson in lessons:
            send(stream, lesson)
        send_end(stream)
        stream.seek(0)
        for lesson in lessons:
            found = receive(stream)
            assert replace(found, sample=None) == replace(lesson, sample=None)
            arrived, sent = (plain(one.sample) for one in (found, lesson))
            assert arrived == sent
        assert receive(stream) is None

    def test_a_lesson_that_is_cut_is_none(self, make_sample):
        stream = io.BytesIO()
        send(stream, self.lesson(make_sample))
        whole = stream.getvalue()
        assert receive(io.BytesIO(whole)) is not None
        for size in {*range(0, len(whole), 61), 3, 4, len(whole) - 1}:
            assert receive(io.BytesIO(whole[:size])) is None, size


@pytest.mark.parametrize("visual", ["stored", "recomputed"])
def test_the_files_are_those_of_a_thread(
    tmp_path, conversations, config, fingerprint, fake_target, started, monkeypatch, visual
):
    """Byte by byte, and both tell how many bytes these are; the process does not see the exporter's devices."""
    ends, environments = [], []
    monkeypatch.setattr(ExportProgress, "end", lambda self, size: ends.append(size))

    def look(process):  # nothing can be read while the new program is being put into place
        environments.append(await_(Path(f"/proc/{process.pid}/environ").read_bytes))

    processes = started(look)
    for writer in ("thread", "process"):
        settings = replace(config, writer=writer, visual=visual)
        export(fake_target(), conversations, tmp_path / writer, settings, fingerprint, progress=False)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / writer).glob("[!.]*")} for writer in ("thread", "process")
    ]
    assert files[0] == files[1]
    assert len(files[0]) > 6
    assert ends[0] == ends[1] == sum(shard.bytes - 1024 for shard in Manifest.read(tmp_path / "thread").shards)
    assert [process.returncode for process in processes] == [0]
    assert b"CUDA_VISIBLE_DEVICES=\0" in environments[0]


def test_nothing_to_do_starts_none(tmp_path, conversations, apart, fingerprint, fake_target, started):
    processes = started(lambda process: None)
    for again in (False, True):
        (tmp_path / MANIFEST).unlink(missing_ok=True)
        export(fake_target(), conversations, tmp_path, apart, fingerprint, progress=False)
        assert len(processes) == 1, again


def test_auto_is_a_process_beside_a_device_of_its_own(config, small_target_path):
    chosen = {
        (writer, device): replace(config, writer=writer).writes_apart(torch.device(device))
        for writer in ("auto", "process", "thread")
        for device in ("cpu", "cuda", "mps")
    }
    assert [case for case, apart in chosen.items() if apart] == [
        *(("auto", device) for device in ("cuda", "mps")),
        *(("process", device) for device in ("cpu", "cuda", "mps")),
    ]
    writers = (ExportConfig((1,), writer=writer) for writer in ("auto", "process", "thread"))
    assert len({fingerprint_checkpoint(small_target_path, found, "d").digest() for found in writers}) == 1


def test_what_waits_is_bounded(tmp_path, many, apart, fingerprint, fake_target, started):
    """With a writer that stands still eight are taught: two are handed over, four wait, and two are to be given."""
    target, processes = fake_target(), started(lambda process: process.send_signal(signal.SIGSTOP))
    thread = threading.Thread(
        target=export, args=(target, many, tmp_path, apart, fingerprint), kwargs={"progress": False}
    )
    thread.start()
    await_(lambda: sum(target.batches) == 8)
    thread.join(0.3)
    assert sum(target.batches) == 8
    processes[0].send_signal(signal.SIGCONT)
    thread.join(120)
    assert [found.key for found in Manifest.read(tmp_path).samples()] == [item.key for item in many]


class TestItFails:
    def test_a_sample_that_cannot_be_stored(self, tmp_path, many, apart, fingerprint, fake_target):
        target = fake_target()
        teach = target.teach
        target.teach = lambda *arguments: [replace(s, last=s.last * float("nan")) for s in teach(*arguments)]
        with pytest.raises(ArtifactError, match=r"^sample 'k.0': the target's 'last' states hold non-finite"):
            export(target, many, tmp_path, apart, fingerprint, progress=False)
        assert sum(target.batches) <= 8  # no more than what may wait
        assert not (tmp_path / MANIFEST).exists()

    def test_no_room(self, tmp_path, many, apart, fingerprint, fake_target, started):
        started(lambda process: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4_000, 4_000)))
        target = fake_target()
        with pytest.raises(ArtifactError, match=r"cannot be written to .*File too large.*resumes behind the last"):
            export(target, many, tmp_path, apart, fingerprint, progress=False)
        assert sum(target.batches) < len(many)
        assert not [*tmp_path.glob("shard-*"), *tmp_path.glob(MANIFEST)]

    def test_it_is_killed(self, tmp_path, many, apart, fingerprint, fake_target, started):
        """While samples come, and behind the last one; the same command goes on."""
        processes = started(lambda process: None)
        target = fake_target(lambda batch: [process.kill() for process in processes])
        killed = r"the process that writes .* was killed by SIGKILL, as .* memory; the same command resumes behind"
        with pytest.raises(ArtifactError, match=killed):
            export(target, many, tmp_path, apart, fingerprint, progress=False)
        assert sum(target.batches) < len(many)
        processes.clear()
        target = fake_target(lambda batch: [process.kill() for process in processes if batch[0].key == "k.38"])
        with pytest.raises(ArtifactError, match=killed):
            export(target, many, tmp_path, apart, fingerprint, progress=False)
        export(fake_target(), many, tmp_path, apart, fingerprint, progress=False)
        assert len(open_artifacts(tmp_path)) == len(many)

    def test_it_cannot_begin(self, tmp_path, many, apart, fingerprint, fake_target, monkeypatch, capfd):
        monkeypatch.setattr("fovea.artifacts.writer_process._MAIN", "raise SystemExit('no such module')")
        with pytest.raises(ArtifactError, match=r"ended with code 1; what it said stands above"):
            export(fake_target(), many, tmp_path, apart, fingerprint, progress=False)
        assert "no such module" in capfd.readouterr().err
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(ArtifactError, match=r"could be started \(No such file.*--writer thread"):
            export(fake_target(), many, tmp_path, apart, fingerprint, progress=False)

    def test_an_error_of_the_exporter_comes_first(self, tmp_path, many, apart, fingerprint, fake_target, started):
        processes = started(lambda process: None)

        def fail(batch):
            if processes:
                processes[0].kill()
                raise RuntimeError("the device is gone")

        with pytest.raises(RuntimeError, match="the device is gone"):
            export(fake_target(fail), many, tmp_path, apart, fingerprint, progress=False)


def children(pid):
    """Processes that ``pid`` has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
        found += [int(path.parent.name)] * (parent == pid)
    return found


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_an_export_waits_for_the_writer_that_a_killed_one_left(
    tmp_path, apart, fingerprint, fake_target, make_conversation, caplog, rank, ranks
):
    """Of this rank's shards, and of anybody's where the shares are others; what it holds is not done again."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), "12", "0.1", "process"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    await_(lambda: list(tmp_path.glob("shard-*.tar")) and list(tmp_path.glob(".shard-*.partial")), process)
    (writer,) = children(process.pid)
    os.kill(writer, signal.SIGSTOP)
    process.kill()
    process.wait()
    left = [path.name for path in tmp_path.glob(".shard-*.partial")]

    conversations = [make_conversation(f"k.{number}") for number in range(12)]
    targets = {number: fake_target() for number in range(ranks)}

    def run(number):
        one = {"progress": False, "rank": number, "world_size": ranks}
        export(targets[number], conversations, tmp_path, apart, fingerprint, **one)

    caplog.set_level(logging.WARNING)
    thread = threading.Thread(target=run, args=(rank,))
    thread.start()
    await_(lambda: "waiting for" in caplog.text)
    assert [path.name for path in tmp_path.glob(".shard-*.partial")] == left
    os.kill(writer, signal.SIGCONT)
    thread.join(120)
    process.communicate()  # whoever holds its standard error has ended
    for number in set(range(ranks)) - {rank}:
        run(number)
    kept = 12 - sum(sum(target.batches) for target in targets.values())
    shards = whole_shards(tmp_path, fingerprint)
    assert kept >= len(left) + 1
    assert Counter(sample.key for shard in shards for sample in shard.samples) == {c.key: 1 for c in conversations}
    open_artifacts(tmp_path).verify()


@pytest.mark.slow
def test_two_ranks_of_torchrun_have_a_writer_each(tmp_path, small_target_path):
    """The command itself, whose module no writer runs again."""
    words = "--standalone --nproc-per-node 2 -m fovea.artifacts.export --writer process --device cpu --answers dataset"
    messages = '"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'
    (tmp_path / "c.jsonl").write_text("".join(f'{{"key": "k.{number}", {messages}}}\n' for number in range(6)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", *words.split(), "--mid-layers", "1", "2"),
            *("--target", small_target_path, "--out", tmp_path / "out"),
            *("--data", "datamodules.conversations:JsonlConversations", f"path={tmp_path / 'c.jsonl'}"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "6 samples in 2 shards" in done.stdout
    assert sorted(sample.key for sample in open_artifacts(tmp_path / "out")) == [f"k.{number}" for number in range(6)]
