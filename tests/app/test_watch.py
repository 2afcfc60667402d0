"""Processes that the first one of a job has started: none of them is lost without a sentence, and nobody hangs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fovea.app.outcome import Outcome
from tests.app.conftest import ROOT, left_over, only, run

#: A first process that waits in the place of a job, with two others; its words: folder, patience and its own seconds.
FIRST = """
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from fovea.app.watch import watch
folder, patience, seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
other = [sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline()))"]
here = SimpleNamespace(creates_processes_externally=False)
launcher = SimpleNamespace(procs=[], num_processes=3, cluster_environment=here)
watch(launcher, folder, patience)
for _ in range(2):
    launcher.procs.append(subprocess.Popen(other, stdin=subprocess.PIPE))
print(*(process.pid for process in launcher.procs), flush=True)
for line in sys.stdin:
    for process in launcher.procs:
        process.communicate(line.encode())
time.sleep(seconds)
print(len(launcher.procs))
sys.exit(3)
"""
#: A process that was started for another one, and waits to join it; its words: folder, patience and its own seconds.
SECOND = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from hydra.core.hydra_config import HydraConfig
from fovea.app.watch import watch_first
HydraConfig.get = staticmethod(lambda: SimpleNamespace(job=SimpleNamespace(name="train_ddp_process_1")))
watch_first(Path(sys.argv[1]), float(sys.argv[2]))
time.sleep(float(sys.argv[3]))
sys.exit(3)
"""
#: A job that a sweep has started, which ends by itself some seconds behind its sweep; its word: its folder.
OF_A_SWEEP = """
import os, sys, time
from pathlib import Path
from fovea.app.watch import watch_sweep
sweep = os.getppid()
watch_sweep(Path(sys.argv[1]))
print("begun", flush=True)
while os.getppid() == sweep:
    time.sleep(0.1)
time.sleep(float(sys.argv[2]))
print("left alone", file=sys.stderr)
"""


def first(folder: Path, patience: float, seconds: float) -> tuple[subprocess.Popen, list[int]]:
    command = [sys.executable, "-c", FIRST, str(folder), str(patience), str(seconds)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=env, **pipes)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def ended(pid: int) -> bool:
    """Whether it is gone, or nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_process_that_is_killed_ends_the_job_with_a_sentence(tmp_path):
    Outcome(["seed=1"]).write(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    process, others = first(tmp_path, 0.2, 600)
    os.kill(others[1], signal.SIGKILL)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 1
    assert told.splitlines()[-1] == (
        "another rank is gone: rank 2 was killed by SIGKILL; its own output says why. Go on from the last checkpoint "
        f"with: python train.py resume={tmp_path}"
    )
    outcome = Outcome.read(tmp_path)
    assert (outcome.overrides, outcome.status, outcome.error) == (["seed=1"], "failed", told.splitlines()[-1])
    assert ended(others[0])


def test_the_first_process_may_say_itself_what_is_wrong(tmp_path):
    process, others = first(tmp_path, 600, 2)
    os.kill(others[0], signal.SIGKILL)
    printed, told = process.communicate(timeout=240)
    assert process.returncode == 3
    assert printed.split() == ["0"]  # nothing that Lightning would look at
    assert "another rank" not in told
    os.kill(others[1], signal.SIGKILL)


def test_processes_that_are_done_disturb_nobody(tmp_path):
    process, _ = first(tmp_path, 0, 1)
    printed, told = process.communicate("0\n", timeout=240)
    assert (process.returncode, printed.split(), told) == (3, ["2"], "")


def second(folder: Path, first: int, seconds: float) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "FOVEA_FIRST_RANK": str(first)}
    command = [sys.executable, "-c", SECOND, str(folder), "0.2", str(seconds)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


def test_a_process_ends_whose_first_one_was_gone_before_it_came(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = second(tmp_path, gone.pid, 600)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("another rank is gone: the first rank was killed")
    assert last.endswith("Start the same command anew")
    done = second(tmp_path, os.getpid(), 3)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(
    ("sweep", "seconds", "last"), [("$$", 600, "The sweep that has started this job is gone."), ("1", 3, "left alone")]
)
def test_a_job_does_not_outlive_the_sweep_that_has_started_it(tmp_path, sweep, seconds, last):
    """A process that something else has started, as a rank of the job, is not meant."""
    command = shlex.join([sys.executable, "-c", OF_A_SWEEP, str(tmp_path), str(seconds)])
    shell = ["sh", "-c", f"FOVEA_SWEEP={sweep} {command} & wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(shell, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.kill()
    _, told = process.communicate(timeout=240)  # the job holds the pipes until it ends
    assert told.splitlines()[-1] == last


def started_by(process: subprocess.Popen) -> int:
    """The second process of a job, started by the first one, as far as it has been."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (second,) = [int(pid) for pid in found if b"LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes()]
    return second


def until(there: Path, lines: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not there.is_file() or there.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)


@pytest.mark.whole
@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_a_job_on_two_devices(workplace, script, dying):
    """Killed behind its first checkpoint or answer; what was answered by two is gone on with by one."""
    folder, overrides = workplace
    out, log = folder / f"{script}-{dying}", folder / f"{script}-{dying}.log"
    more = {
        "train.py": ["trainer.max_epochs=1000", "speed_eval=off", "callbacks.checkpoint.every_n_steps=1"],
        "evaluate.py": ["method=pld", "decode.max_new_tokens=200", "speed.prompts=12"],
    }[script]
    words = [*overrides, *more, "trainer.devices=2", "logger=csv", f"hydra.run.dir={out}"]
    journal = out / "evaluation" / "final" / ".answers-00-of-02.jsonl"
    with log.open("w") as stream:
        command = [sys.executable, str(ROOT / script), *words]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=stream, stderr=stream)
        if script == "train.py":
            until(out / "checkpoints" / "last.ckpt", 1, process, log)
        else:
            until(journal, 2, process, log)
        os.kill(process.pid if dying == 0 else started_by(process), signal.SIGKILL)
        code = process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while left_over(folder):
        assert time.monotonic() < deadline, left_over(folder)
        time.sleep(0.2)
    assert code == (1 if dying else -signal.SIGKILL)
    last = log.read_text().splitlines()[-1]
    assert "another rank is gone" in last
    assert f"python {script} resume={out}" in last
    outcome = Outcome.read(out)
    assert outcome.status == ("failed" if dying else "interrupted")
    if script == "evaluate.py":
        done = run(script, folder, f"resume={out}", "trainer.devices=1", f"name=alone-{dying}")
        assert done.returncode == 0, done.stderr
        alone = only(folder, f"outputs/*/*-alone-{dying}")
        settings = json.loads((alone / "evaluation" / "final" / "evaluation.json").read_text())["settings"]
        assert settings["processes_before_resuming"] == [2]
