"""Command lines of campaigns: what is theirs, and what goes on to the entry points."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fovea.app.launch import composed

#: Folder of trained drafters in the cache, where targets and artifacts are.
DRAFTERS = "drafters"


def overrides_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[str, ...]:
    """The ``words`` that ``parser`` left over, if all are overrides of settings; otherwise it ends the program."""
    if strangers := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"unknown arguments: {' '.join(strangers)}")
    return tuple(words)


def count(text: str) -> int:
    """A number of 1 or more, for ``type`` of an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number of 1 or more")
    return number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is done within, the job at work too, with one sentence and exit code 130."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on behind what is finished.")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def path(text: str) -> Path:
    """A path from where one stands; jobs run from there too."""
    return Path(text).expanduser().resolve()


def default_checkpoints(overrides: Sequence[str]) -> Path:
    """Where drafters are kept, unless it is said: beside the targets, in the cache that the settings name."""
    return path(composed("train", overrides).paths.cache) / DRAFTERS
