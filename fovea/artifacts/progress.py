"""How far an export is, over all ranks that share its folder: samples a second, bytes, time that is left."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fovea.artifacts.manifest import write_json

logger = logging.getLogger(__name__)

#: Seconds between two notes of a rank, and between two lines where there is no terminal to draw a bar on.
_NOTE, _LINE = 2.0, 60.0
#: Seconds without a note after which a rank counts as stopped.
_STOPPED = 300.0


@dataclass(frozen=True)
class Pace:
    """What a rank notes about itself.

    Attributes:
        done: conversations of its share that are done, those of earlier runs included.
        fresh: of them, those of this run.
        bytes: in its shards of this run.
        seconds: since this run began.
        at: when that was, as seconds of the clock.
        ended: whether its share is done.
    """

    done: int
    fresh: int = 0
    bytes: int = 0
    seconds: float = 0.0
    at: float = 0.0
    ended: bool = False


class ExportProgress:
    """Notes the pace of this rank in ``folder``, and shows that of all.

    Args:
        total: conversations, over all ranks.
        done: those of this rank's share that earlier runs did.
        shown: draws a bar on a terminal, or writes a line a minute elsewhere; on rank 0 alone.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, *, total: int, done: int, shown: bool) -> None:
        self._folder, self._world_size, self._total = folder, world_size, total
        self._path = folder / f".pace-{rank:02d}-of-{world_size:02d}.json"
        self._earlier, self._fresh, self._start = done, 0, time.monotonic()
        self._noted = self._written = 0.0
        console = Console(stderr=True)
        self._lines = shown and rank == 0 and not console.is_terminal
        columns = (TextColumn("exporting artifacts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        drawn = shown and rank == 0 and console.is_terminal
        self._bars = Progress(*columns, TextColumn("{task.fields[pace]}"), console=console, disable=not drawn)
        self._task = self._bars.add_task("export", total=total, completed=done, pace="")

    @contextlib.contextmanager
    def shown(self) -> Iterator[ExportProgress]:
        """Shows the pace within; what is noted last is that this rank's share has ended, if it has."""
        self._note(0, ended=False)
        with self._bars:
            yield self

    def advance(self, count: int, size: int) -> None:
        """``count`` more conversations are done, and ``size`` bytes are in this rank's shards of this run."""
        self._fresh += count
        now = time.monotonic()
        if now - self._noted < _NOTE:
            return
        self._noted = now
        self._note(size, ended=False)
        done, text = self.summary()
        self._bars.update(self._task, completed=done, pace=text)
        if self._lines and now - max(self._written, self._start) >= _LINE:
            self._written = now
            logger.info("export: %s of %s conversations, %s", f"{done:,}", f"{self._total:,}", text)

    def end(self, size: int) -> None:
        """This rank's share is done."""
        self._note(size, ended=True)

    def summary(self) -> tuple[int, str]:
        """Conversations that all ranks have done, and their pace in words."""
        paces = [pace for path in self._folder.glob(f".pace-*-of-{self._world_size:02d}.json") if (pace := _read(path))]
        now = time.time()
        done, size = sum(pace.done for pace in paces), sum(pace.bytes for pace in paces)
        at_work = [pace for pace in paces if not pace.ended and pace.seconds and now - pace.at < _STOPPED]
        rate = sum(pace.fresh / pace.seconds for pace in at_work)
        text = f"{rate:,.1f}/s, {size / 1e9:,.2f} GB"
        if rate:
            text += f", about {timedelta(seconds=round((self._total - done) / rate))} left"
        if self._world_size > 1:
            text += f", {len(at_work)} of {self._world_size} ranks at work"
        return done, text

    def _note(self, size: int, *, ended: bool) -> None:
        done, seconds = self._earlier + self._fresh, time.monotonic() - self._start
        write_json(self._path, asdict(Pace(done, self._fresh, size, seconds, time.time(), ended)))


def forget_paces(folder: Path) -> None:
    """Removes what ranks noted; for when all are done."""
    for path in folder.glob(".pace-*.json"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> Pace | None:
    try:
        pace = Pace(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):  # removed meanwhile, or of another version
        return None
    return pace if all(isinstance(value, int | float) for value in asdict(pace).values()) else None
