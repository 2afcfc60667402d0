"""The processes of a job, one per rank.

They are forked from this process, which has imported everything and computed nothing: no thread runs yet that a fork
would lose, and a kill costs the job's own time and not that of importing torch.

Ranks of an export know each other by the environment alone, as torchrun sets it. The ranks of a training or an
evaluation are started by the first of them, through Lightning, and watch each other. That is left as it is, except that
the first one forks the second before it does anything else, and Lightning hands its command to that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from lightning.fabric.strategies.launchers import subprocess_script as fabric_launcher
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.launchers import subprocess_script as trainer_launcher

ROOT = Path(__file__).resolve().parents[2]
#: Of Linux' ``prctl``: orphans below this process become its children, so that it learns how they ended.
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        script: an entry point in the root of the project, or the module of a command.
        arguments: as typed.
        folder: where it starts.
        watched: folder whose files say how far it is.
        ranks: processes that share it, 1 or 2.
    """

    script: str
    arguments: tuple[str, ...]
    folder: Path
    watched: Path
    ranks: int = 1


class Processes:
    """Those of a job under way; ``pids`` by rank, the first one is the leader of their group."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._codes = list(pids), dict[int, int]()

    def code(self, without: int | None = None) -> int | None:
        """The first exit code, by rank, that is not 0, when all and what they have started are gone; else None.

        That of the rank ``without`` counts for nothing.
        """
        for rank, pid in enumerate(self._pids):
            if rank not in self._codes and (code := _ended(pid)) is not None:
                self._codes[rank] = code
        if len(self._codes) < len(self._pids) or self._orphans():
            return None
        return next((code for rank, code in sorted(self._codes.items()) if code and rank != without), 0)

    def _orphans(self) -> bool:
        """Whether something that they have started is still there."""
        try:
            while os.waitpid(-self._pids[0], os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True

    def kill(self) -> None:
        """All of them, and what they have started; they are gone then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids[0], signal.SIGKILL)
        while self.code() is None:
            time.sleep(0.001)

    def kill_one(self, rank: int) -> None:
        """The process of ``rank``, if it is still there."""
        if rank not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGKILL)


def start(job: Job, log: Path) -> Processes:
    """The processes of ``job``, whose output goes to ``log``."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if job.ranks == 1:
        return Processes([_fork(lambda: _run(job), log)])
    if job.script.endswith(".py"):
        told, tell = os.pipe()
        first = _fork(lambda: _run_as_two(job, tell), log)
        os.close(tell)
        with open(told, "rb") as answer:
            return Processes([first, int(answer.readline())])
    pids = list[int]()
    for rank in range(job.ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": str(rank)}
        pids.append(_fork(lambda place=place: _run(job, place), log, *pids[:1]))
    return Processes(pids)


def apart(work: Callable[[], object], log: Path) -> None:
    """Does ``work`` in a child, so that no thread that it starts stays here.

    Raises:
        RuntimeError: it failed.
    """
    pid = _fork(work, log)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(last_words(log))


def last_words(log: Path) -> str:
    """The last lines of ``log``, in one."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-6:])


def _fork(work: Callable[[], object], log: Path, group: int = 0) -> int:
    """A process that does ``work`` and ends with the exit code of a script, in ``group`` or one of its own."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads run here, and a fork would lose all but one")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, group)
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
        os.setpgid(pid, group or pid)  # the child does so too; whoever comes first
    return pid


def _run(job: Job, place: Mapping[str, str] | None = None) -> None:
    os.chdir(job.folder)
    os.environ |= place or {}
    sys.argv = [job.script, *job.arguments]
    _script(job.script)


def _script(script: str) -> None:
    if script.endswith(".py"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        from fovea.artifacts.command import main

        main()


def _run_as_two(job: Job, tell: int) -> None:
    """The first rank, and in a fork of it the second, whose number is written to ``tell``."""
    commands, command = os.pipe()
    if (second := os.fork()) != 0:
        os.close(commands)
        with open(tell, "wb") as drill:
            drill.write(f"{second}\n".encode())
        _lend(second, command)
        _run(job)
        return
    os.close(tell)
    os.close(command)
    with open(commands, "rb") as given:
        if not (text := given.read()):
            return  # the first rank is gone before it came to starting another
    words, env, folder = json.loads(text)
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    sys.argv = words[1:]  # behind the interpreter
    rank_zero_only.rank = int(env["LOCAL_RANK"])  # pyright: ignore[reportFunctionMemberAccess] - set when imported
    _script(job.script)


def _lend(pid: int, command: int) -> None:
    """Has Lightning, in this process, write to ``command`` what it would start, and take ``pid`` for having started."""

    def take(words: Sequence[str], env: Mapping[str, str], cwd: str | None) -> _Lent:
        text = json.dumps([list(words), dict(env), cwd or os.getcwd()])
        with contextlib.suppress(BrokenPipeError), open(command, "wb") as given:  # killed already
            given.write(text.encode())
        return _Lent(pid)

    for launcher in (fabric_launcher, trainer_launcher):
        vars(launcher)["subprocess"] = SimpleNamespace(Popen=take)


class _Lent:
    """What Lightning and our watch use of ``subprocess.Popen``, for a child that was there before."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode, self._asking = pid, None, threading.Lock()

    def poll(self) -> int | None:
        if self._asking.acquire(blocking=False):  # else somebody waits for it
            try:
                if self.returncode is None:
                    self.returncode = _ended(self.pid)
            finally:
                self._asking.release()
        return self.returncode

    def wait(self) -> int:
        with self._asking:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ended(pid: int) -> int | None:
    """The exit code of ``pid``, 0 if its parent has been told; None while it is there."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # another one's child, until that is gone
        return None if Path(f"/proc/{pid}").exists() else 0
    return os.waitstatus_to_exitcode(status) if done else None
