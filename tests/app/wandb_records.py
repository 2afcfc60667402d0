"""What an offline run of W&B has written down to be sent, read back without W&B's own reader."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The file is a log in blocks, as LevelDB writes it: a header of 7 bytes, then records in chunks with headers of 7.
_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4


#: Seconds that W&B's own process may take to write down how a finished run has ended.
_PATIENCE = 30.0


def records(folder: Path) -> list[Any]:
    """The records of the only offline run below ``folder``, which is finished."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        found = list(_parsed(path))
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{path} does not say how its run ended")


def _parsed(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for content in _chunks(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        yield record


def _chunks(data: bytes) -> Iterator[bytes]:
    offset, parts = _HEADER, b""
    while offset + _HEADER <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER:
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + _HEADER])
        if offset + _HEADER + length > len(data):
            return  # the rest is not written yet
        parts += data[offset + _HEADER : offset + _HEADER + length]
        offset += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def files(folder: Path) -> dict[str, str]:
    """The tables and pages of that run, by their keys."""
    media = next(folder.glob("wandb/offline-run-*/files/media"))
    found = [*media.glob("table/**/*.json"), *media.glob("html/**/*.html")]
    return {f"{path.parent.name}/{path.name.rsplit('_', 2)[0]}": path.read_text(encoding="utf-8") for path in found}
