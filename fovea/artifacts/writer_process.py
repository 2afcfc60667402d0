"""A process that encodes, hashes and writes, so that none of it takes the interpreter of the one that feeds the device.

It is a new interpreter, not a fork, and runs this module alone: neither the script that exports, nor anything of its
devices. Lessons come through its standard input; for each of them, and once the last shard is whole, a line of JSON
goes back. However the exporting process ends, what it has handed over whole is stored, and the writer ends too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.handover import receive, receive_head, send, send_end, send_head
from fovea.artifacts.lesson import Lesson
from fovea.artifacts.schema import StoredDtype
from fovea.artifacts.writer import ArtifactWriter, whole_shards

#: Lessons handed over and not yet known to be stored: while one is written the next is copied from the device.
_AHEAD = 1
_MAIN = "from fovea.artifacts.writer_process import main; main()"


class WriterProcess:
    """An :class:`ArtifactWriter` in a process of its own, which the first lesson starts; a context manager.

    Args:
        folder, fingerprint, dtype, shard_bytes, rank: those of the writer.
        locks: files that this process has locked; they stay so until the writer has ended, however this one ends.

    Attributes:
        done: keys of all samples in complete shards at the start.
        bytes: appended since then, as far as the writer has told.

    Raises:
        FingerprintMismatchError: if the folder holds shards with another fingerprint.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        *,
        dtype: StoredDtype,
        shard_bytes: int,
        rank: int = 0,
        locks: Sequence[IO[str]] = (),
    ) -> None:
        self._folder, self._locks, self.bytes = folder, locks, 0
        self.done = frozenset(sample.key for shard in whole_shards(folder, fingerprint) for sample in shard.samples)
        self._about = {"folder": str(folder), "fingerprint": asdict(fingerprint)}
        self._about |= {"dtype": dtype, "shard_bytes": shard_bytes, "rank": rank}
        self._process: subprocess.Popen[bytes] | None = None
        self._unanswered, self._turn = 0, threading.Lock()

    def store(self, lesson: Lesson) -> None:
        """Hands ``lesson`` over; waits while the writer has others to do.

        Raises:
            ArtifactError: the writer could not store this one or an earlier one, is gone, or cannot be started.
        """
        with self._turn:
            if self._process is None:
                self._process = self._start()
            ended = False
            try:
                send(self._samples, lesson)
            except BrokenPipeError:
                ended = True  # its last answer, or that there is none, raises the error
            self._unanswered += 1
            while ended or self._unanswered > _AHEAD:
                self._read_answer()

    def __enter__(self) -> WriterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        try:
            with self._turn, suppress(BrokenPipeError):
                send_end(self._samples)
            while not self._read_answer():
                pass
        except ArtifactError:
            if error is None:  # otherwise the first one says more
                raise
        finally:
            with suppress(BrokenPipeError):
                self._samples.close()
            self._answers.close()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # No GPU, which is the exporter's, and one core; modules are found where this process finds them.
        modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
        try:
            with _interrupts_blocked():
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _MAIN],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | environment,
                    pass_fds=[lock.fileno() for lock in self._locks],
                )
        except OSError as error:
            raise ArtifactError(
                f"no process that writes artifacts could be started ({error.strerror or error}); a thread can write "
                "them too: data.export.writer=thread, or --writer thread"
            ) from error
        assert process.stdin is not None
        assert process.stdout is not None
        self._samples, self._answers = process.stdin, process.stdout
        with suppress(BrokenPipeError):  # the first lesson tells
            send_head(self._samples, self._about)
            self._samples.flush()
        return process

    def _read_answer(self) -> bool:
        """Whether it was the last one.

        Raises:
            ArtifactError: that of the writer, or the writer is gone.
        """
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise self._gone()
        answer = json.loads(line)
        if "error" in answer:
            raise ArtifactError(answer["error"])
        self.bytes = answer["bytes"]
        self._unanswered -= 1
        return answer["whole"]

    def _gone(self) -> ArtifactError:
        assert self._process is not None
        code = self._process.wait()
        how = f"ended with code {code}; what it said stands above"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as a host does that runs out of memory"
        return ArtifactError(
            f"the process that writes artifacts to {self._folder} {how}; the same command resumes behind the last "
            "whole shard"
        )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Lets a process begin that never heeds Ctrl-C; for this one it is only postponed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """What the process runs: stores what comes, and tells."""
    logging.disable(logging.WARNING)  # what there is to warn of the exporter has warned of
    samples = sys.stdin.buffer
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where whatever prints belongs

    def tell(**answer: Any) -> None:
        with suppress(BrokenPipeError):  # nobody is left to be told
            os.write(answers, json.dumps(answer).encode() + b"\n")

    if (about := receive_head(samples)) is None:
        return
    folder, fingerprint = Path(about.pop("folder")), Fingerprint.from_json(about.pop("fingerprint"))
    try:
        with ArtifactWriter(folder, fingerprint, **about) as writer:
            while (lesson := receive(samples)) is not None:
                writer.store(lesson)
                tell(bytes=writer.bytes, whole=False)
        tell(bytes=writer.bytes, whole=True)
    except (ArtifactError, OSError) as error:
        tell(error=str(error))
