"""Python code that comes with a checkpoint is never run.

Whatever of transformers reads a folder is given ``trust_remote_code=False``: left to itself it asks on the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fovea.targets.spec import UnsupportedTargetError


@contextmanager
def remote_code_refused(folder: Path) -> Iterator[None]:
    """Says in our words what transformers says of a ``folder`` that it could only read by code of the folder's own.

    Raises:
        UnsupportedTargetError: it is such a folder.
    """
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedTargetError(
            f"'{folder}' can only be read by Python code that it brings (auto_map in its files), and nothing that is "
            "read may run code; name a copy that transformers reads by itself, or add the architecture as "
            "docs/new_target.md shows"
        ) from error
