"""Jobs as child processes that can be killed at a moment drawn by chance.

A job is forked from this process, which has imported everything and computed nothing: no thread runs yet that a fork
would lose, and a kill costs the job's own time and not that of importing torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Seconds after which a job that should end by itself is taken for hanging.
_PATIENCE = 300.0
#: Seconds between two looks at the files of a job.
_LOOK = 0.001


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        script: an entry point in the root of the project, or the module of a command.
        arguments: as typed.
        folder: where it starts.
        watched: folder whose files say how far it is.
    """

    script: str
    arguments: tuple[str, ...]
    folder: Path
    watched: Path


@dataclass(frozen=True)
class Pace:
    """How a job went that nobody disturbed: seconds, and how often its files changed."""

    seconds: float
    changes: int


def run_whole(job: Job, log: Path) -> Pace:
    """Runs ``job`` to its end.

    Raises:
        RuntimeError: it failed or hangs; its last words are quoted.
    """
    start, pid = time.monotonic(), _start(job, log)
    changes, before = 0, _state(job.watched)
    while (code := _ended(pid)) is None:
        time.sleep(_LOOK)
        now = _state(job.watched)
        changes, before = changes + (now != before), now
        if time.monotonic() - start > _PATIENCE:
            _kill(pid)
            raise RuntimeError(f"{job.script} does not end; its output is in {log}")
    if code != 0:
        raise RuntimeError(f"{job.script} ended with {code}: {_last_words(log)}")
    return Pace(time.monotonic() - start, changes)


def run_killed(job: Job, log: Path, pace: Pace, draw: random.Random) -> bool:
    """Runs ``job`` and kills it with all its processes; false if it was done before.

    Half of the moments are drawn by the clock, the others just behind a change of its files, in the middle of a write
    or of a renaming.

    Raises:
        RuntimeError: it failed before it was killed.
    """
    by_clock = draw.random() < 0.5
    early = draw.random() ** 1.5  # a resumed job has less to do than a whole one
    moment = early * pace.seconds if by_clock else draw.uniform(0.0, 0.004)
    left = 0 if by_clock else 1 + int(early * pace.changes)
    start, pid = time.monotonic(), _start(job, log)
    before, due = _state(job.watched), start + moment if by_clock else start + _PATIENCE
    while time.monotonic() < due:
        time.sleep(0 if left == 0 and not by_clock else _LOOK)
        if (code := _ended(pid)) is not None:
            if code != 0:
                raise RuntimeError(f"{job.script} ended with {code} and was not killed: {_last_words(log)}")
            return False
        if left and (now := _state(job.watched)) != before:
            before, left = now, left - 1
            if not left:
                due = time.monotonic() + moment
    _kill(pid)
    return True


def apart(work: Callable[[], object], log: Path) -> None:
    """Does ``work`` in a child, so that no thread that it starts stays here.

    Raises:
        RuntimeError: it failed.
    """
    pid = _fork(work, log)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(_last_words(log))


def _start(job: Job, log: Path) -> int:
    def work() -> None:
        os.chdir(job.folder)
        sys.argv = [job.script, *job.arguments]
        _run(job.script)

    return _fork(work, log)


def _fork(work: Callable[[], object], log: Path) -> int:
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads run here, and a fork would lose all but one")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            with log.open("ab") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does so too; whoever comes first
    return pid


def _run(script: str) -> None:
    if script.endswith(".py"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        from fovea.artifacts.command import main

        main()


def _ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _state(folder: Path) -> set[tuple[str, int]]:
    """Names and sizes of all files below ``folder``."""
    return set(_files(folder))


def _files(folder: Path | str) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False).st_size
    except OSError:  # renamed or removed meanwhile
        return


def _last_words(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-6:])
