"""Files that stand under their name whole or not at all, however the process that writes them ends."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: No space, a user's quota, and a limit on the size of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: What libraries that hide the number say instead.
_WORDS = tuple(os.strerror(number) for number in _FULL)


class DiskFullError(OSError):
    """There is no room for a file; the message names it and says how to go on."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; what lies there at the end takes the place of ``path`` in one piece.

    If the block fails nothing of it is left; what a killed process leaves is hidden, and called ``.*.partial``.

    Raises:
        DiskFullError: there is no room for it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with room_for(path):
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # else a machine that stops may keep the new name and not the content
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Puts ``text`` into ``path`` as UTF-8, in one piece."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Puts ``content`` into ``path``, in one piece."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Says in words that there is no room for ``path``, whatever a library inside makes of it.

    Raises:
        DiskFullError: there is none.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise DiskFullError(no_room(str(path), path.parent, error)) from error


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk, a quota or a limit is used up."""
    return getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _WORDS)


def no_room(what: str, folder: Path, error: BaseException) -> str:
    """The sentence for a file ``what`` that did not fit into ``folder``."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
    except OSError:
        free = "its folder cannot be looked at"
    reason = next((words for words in _WORDS if words in str(error)), str(error))
    return (
        f"no room for {what} ({reason}; {free}); make room, or have your quota raised. What was written before is "
        "sound: the same command goes on with an export, resume=<run folder> with a run"
    )
