"""What an offline run of W&B has written down to be sent, read back without W&B's own reader."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The file is a log in blocks, as LevelDB writes it: a header of 7 bytes, then records in chunks with headers of 7.
_HEADER, _BLOCK = 7, 32768
_FULL, _LAST = 1, 4


def records(folder: Path) -> Iterator[Any]:
    """The records of the only offline run below ``folder``."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
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
        parts += data[offset + _HEADER : offset + _HEADER + length]
        offset += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def files(folder: Path) -> dict[str, str]:
    """The tables and pages of that run, by their keys."""
    media = next(folder.glob("wandb/offline-run-*/files/media"))
    found = [*media.glob("table/**/*.json"), *media.glob("html/**/*.html")]
    return {f"{path.parent.name}/{path.name.split('_')[0]}": path.read_text(encoding="utf-8") for path in found}
