"""The lines of TSV files: where each row begins, and that none is cut or too long, before a library reads them.

The library would fill a cut row up in silence, and of one that is too long it does not say where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datamodules.conversation_source import SourceError

_MARK = b"\xef\xbb\xbf"
#: A field in quotes, which may hold tabs, line ends and doubled quotes; text behind the last quote belongs to it too.
_QUOTED = re.compile(rb'"[^"]*(?:""[^"]*)*"(?!")')


@dataclass(frozen=True)
class Sheet:
    """A TSV file: its columns, and the line at which each row begins, from 1."""

    columns: Sequence[str]
    rows: Sequence[int]


def sheet(path: Path) -> Sheet:
    """Reads the lines of a TSV file once; pictures in them are passed over and not decoded.

    Raises:
        SourceError: it is not UTF-8, or a row has not as many fields as the header; the message names file and line.
    """
    rows = _rows(path)
    _, count, header = next(rows, (1, 0, b""))
    columns = [name.strip('"') for name in header.decode("utf-8").split("\t")]
    doubled = [name for place, name in enumerate(columns) if name in columns[:place]]
    if not count or doubled:
        why = f"column '{doubled[0]}' stands there twice" if doubled else "the file is empty"
        raise SourceError(f"{path}, line 1: no header of a table, {why}; download it anew")
    lines = []
    for line, found, _ in rows:
        if found != count:
            names = f"there is none for {', '.join(columns[found:])}" if found < count else "the last is one too many"
            raise SourceError(
                f"{path}, line {line}: {found} fields, and the header has {count}; {names}: mend the row, or download "
                "the file anew"
            )
        lines.append(line)
    return Sheet(columns, lines)


def _rows(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """First line, number of fields and bytes of every row that is not empty."""
    with path.open("rb") as file:
        row, begun = b"", 1
        for number, text in enumerate(file, 1):
            text = text.removeprefix(_MARK) if number == 1 else text
            _require_utf8(path, number, text)
            row, begun = (row + text, begun) if row else (text, number)
            content = row.rstrip(b"\r\n")
            count = _fields(content)
            if count is not None:
                if content:
                    yield begun, count, content
                row = b""
        if row:
            raise SourceError(f"{path}, line {begun}: a field in quotes that does not end; download the file anew")


def _fields(row: bytes) -> int | None:
    """Number of fields; None if the last one is in quotes and goes on in the next line."""
    if b'"' not in row:
        return row.count(b"\t") + 1
    count, place = 1, 0
    while True:
        if row.startswith(b'"', place):
            if (quoted := _QUOTED.match(row, place)) is None:
                return None
            place = quoted.end()
        if (tab := row.find(b"\t", place)) < 0:
            return count
        count, place = count + 1, tab + 1


def _require_utf8(path: Path, line: int, text: bytes) -> None:
    if text.isascii():
        return
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise SourceError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}); save it as UTF-8") from None
