"""Checkpoint folders that the project makes itself: made once, and there only when they are whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path


def published(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``write`` unless it is there; nothing is left of what was not finished."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as building:
        draft = Path(building) / "target"
        write(draft)
        try:
            draft.rename(folder)
        except OSError:  # another process has published the same target meanwhile
            if not folder.is_dir():
                raise
    return folder
