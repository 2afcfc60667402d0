"""One run of an entry point, done once: its record says what it depends on, and is written when it has ended well."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fovea.app.outcome import FILE, Outcome
from fovea.app.runs import LAST_CHECKPOINT, OWN_FOLDER
from fovea.campaign.keys import ROOT
from fovea.files import write_text

#: In the folder of a job: its record, what it said, and what it was begun with.
RECORD, CONSOLE, BEGUN = "job.json", "console.log", ".begun.json"

State = Literal["missing", "other settings", "other code", "finished"]


class JobError(RuntimeError):
    """A run of an entry point failed; the message says which, and where its words are."""


@dataclass(frozen=True)
class Job:
    """A run of an entry point.

    Attributes:
        script: train.py or evaluate.py.
        overrides: as typed, without the folder.
        folder: of the run.
        settings, code: digests of what it depends on, see :mod:`fovea.campaign.keys`.
    """

    script: str
    overrides: tuple[str, ...]
    folder: Path
    settings: str
    code: str

    @property
    def arguments(self) -> list[str]:
        """What is typed behind ``python``; a training that was cut short goes on from its last checkpoint."""
        resumed = [f"resume={OWN_FOLDER}"] if self.script == "train.py" else []
        return [self.script, *self.overrides, *resumed, f"hydra.run.dir={self.folder}"]

    @property
    def command(self) -> str:
        """The command line, for a shell in the project's folder."""
        return shlex.join(["python", *self.arguments])

    def state(self) -> State:
        """What lies in its folder already."""
        record = read_record(self.folder)
        if record is None:
            return "missing"
        if record.settings != self.settings:
            return "other settings"
        return "finished" if record.code == self.code else "other code"

    def run(self, *, shown: bool) -> Record:
        """Runs it, and keeps its record.

        What an earlier call has left of the same job, by the same code, is gone on with: a training from its last
        checkpoint, an evaluation behind its last answer. Anything else in the folder is removed.

        Args:
            shown: its words go to the console; otherwise to :data:`CONSOLE` in its folder.

        Raises:
            JobError: it did not end well.
        """
        with _alone(self.folder) as lock:
            if self.state() == "finished" and (done := read_record(self.folder)) is not None:
                return done  # by the call that was waited for
            before = self._begin()
            start = time.perf_counter()
            code = self._call(shown, lock)
            seconds = before + time.perf_counter() - start
        outcome = Outcome.read(self.folder) if (self.folder / FILE).is_file() else None
        if code or outcome is None or outcome.status != "completed":
            why = outcome.error if outcome is not None else f"{self.script} ended with {code}"
            raise JobError(why if shown else f"{why} ({self.folder / CONSOLE})")
        record = Record(self.command, self.settings, self.code, seconds, outcome.metrics)
        record.write(self.folder)
        return record

    def _begin(self) -> float:
        """Empties the folder unless the same job was cut short in it; seconds that went into what is kept of it."""
        own, seconds = {"settings": self.settings, "code": self.code}, 0.0
        try:
            begun = json.loads((self.folder / BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            begun = {}
        if read_record(self.folder) is None and {name: begun.get(name) for name in own} == own:
            seconds = float(begun["seconds"])
            if (checkpoint := self.folder / LAST_CHECKPOINT).is_file():
                seconds += max(0.0, checkpoint.stat().st_mtime - float(begun["at"]))
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        (self.folder / FILE).unlink(missing_ok=True)
        write_text(self.folder / BEGUN, json.dumps({**own, "seconds": seconds, "at": time.time()}))
        return seconds

    def _call(self, shown: bool, lock: int) -> int:
        """The exit code; the child holds the ``lock`` too, should we be killed before it ends."""
        command = [sys.executable, str(ROOT / self.script), *self.arguments[1:]]
        if shown:
            return subprocess.run(command, check=False, pass_fds=[lock]).returncode
        with (self.folder / CONSOLE).open("ab") as stream:
            return subprocess.run(
                command, check=False, stdout=stream, stderr=subprocess.STDOUT, pass_fds=[lock]
            ).returncode


@dataclass(frozen=True)
class Record:
    """A job that ended well: its command, what it depended on, how long it took, and its headline numbers."""

    command: str
    settings: str
    code: str
    seconds: float
    metrics: dict[str, float]

    def write(self, folder: Path) -> None:
        """Writes it in one piece, as the last of the job's files: a job that was killed has none."""
        draft = folder / f".{RECORD}"
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(draft, folder / RECORD)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Waits until nobody else runs a job in ``folder``, such as what a killed call has left at work."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"    {folder} is being written by another call; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def read_record(folder: Path) -> Record | None:
    """The record in ``folder``; None if there is no job that ended well."""
    path = folder / RECORD
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def trained_seconds(folders: Sequence[Path]) -> float:
    """Seconds that the finished jobs in ``folders`` have trained; all of its seconds of one that did not count."""
    records = filter(None, map(read_record, folders))
    return sum(record.metrics.get("train_s", record.seconds) for record in records)
