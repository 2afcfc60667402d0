"""Jobs as child processes that can be killed at a moment drawn by chance, whole or one rank alone."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drill.processes import Job, last_words, start

#: Seconds after which a job that should end by itself is taken for hanging, and seconds it has when a rank is gone.
_PATIENCE, _ALONE = 900.0, 60.0
#: What the ranks that are left must say then.
_SAID = "another rank is gone"
#: Seconds between two looks at the files of a job.
_LOOK = 0.001


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
    began, processes = time.monotonic(), start(job, log)
    changes, before = 0, _state(job.watched)
    while (code := processes.code()) is None:
        time.sleep(_LOOK)
        now = _state(job.watched)
        changes, before = changes + (now != before), now
        if time.monotonic() - began > _PATIENCE:
            processes.kill()
            raise RuntimeError(f"{job.script} does not end; its output is in {log}")
    if code != 0:
        raise RuntimeError(f"{job.script} ended with {code}: {last_words(log)}")
    return Pace(time.monotonic() - began, changes)


def run_killed(job: Job, log: Path, pace: Pace, draw: random.Random) -> int:
    """Runs ``job`` and kills it: all its processes or, of several ranks, half of the times one alone.

    Half of the moments are drawn by the clock, the others just behind a change of its files, in the middle of a write
    or of a renaming.

    Returns:
        How many ranks were killed; 0 if it was done before.

    Raises:
        RuntimeError: it failed before it was killed, or does not end as it should when a rank is gone.
    """
    alone = draw.randrange(job.ranks) if job.ranks > 1 and draw.random() < 0.5 else None
    by_clock = draw.random() < 0.5
    early = draw.random() ** 1.5  # a resumed job has less to do than a whole one
    moment = early * pace.seconds if by_clock else draw.uniform(0.0, 0.004)
    left = 0 if by_clock else 1 + int(early * pace.changes)
    spoken = log.stat().st_size if log.is_file() else 0
    began, processes = time.monotonic(), start(job, log)
    before, due = _state(job.watched), began + moment if by_clock else began + _PATIENCE
    while time.monotonic() < due:
        time.sleep(0 if left == 0 and not by_clock else _LOOK)
        if (code := processes.code()) is not None:
            if code != 0:
                raise RuntimeError(f"{job.script} ended with {code} and was not killed: {last_words(log)}")
            return 0
        if left and (now := _state(job.watched)) != before:
            before, left = now, left - 1
            if not left:
                due = time.monotonic() + moment
    if alone is None:
        processes.kill()
        return job.ranks
    processes.kill_one(alone)
    deadline = time.monotonic() + _ALONE
    while (code := processes.code(without=alone)) is None:
        if time.monotonic() > deadline:
            processes.kill()
            raise RuntimeError(f"{job.script} does not end when rank {alone} is killed; its output is in {log}")
        time.sleep(0.01)
    if code != 0 and _SAID not in log.read_bytes()[spoken:].decode(errors="replace"):
        raise RuntimeError(f"{job.script} does not say that rank {alone} was killed, but: {last_words(log)}")
    return 1


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
