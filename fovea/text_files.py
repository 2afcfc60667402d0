"""Text and JSON that others wrote: UTF-8 with or without a byte order mark, any line ends, errors with file and line.

Every function takes the error that it raises, so that each part of the program keeps its own.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: How a file begins that Windows calls "Unicode".
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: What Python makes of a byte that is no UTF-8, where it is asked to go on.
_ESCAPED = re.compile("[\udc80-\udcff]")
_REMEDY = "save it as UTF-8, for example with iconv -f latin1 -t utf-8"


def read_text(path: Path, error: type[ValueError] = ValueError) -> str:
    """The text of a file.

    Raises:
        error: it is not UTF-8, or cannot be read; the message names file, line and remedy.
    """
    return "".join(text for _, text in text_lines(path, error))


def text_lines(path: Path, error: type[ValueError] = ValueError) -> Iterator[tuple[int, str]]:
    r"""The lines of a file with their numbers, from 1; each ends in ``\n``, however it ends in the file.

    Raises:
        error: it is not UTF-8, or cannot be read; the message names file, line and remedy.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if "\0" in text:
                    raise error(f"{path}, line {number}: holds a zero byte; it is no text, or UTF-16: save it as UTF-8")
                yield number, text
    except UnicodeDecodeError:
        raise error(_not_text(path)) from None
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror or reason}); give a file that can") from reason


def read_json(path: Path, error: type[ValueError] = ValueError) -> Any:
    """What a JSON file holds.

    Raises:
        error: it is not UTF-8 or not JSON, or an object in it has one name twice; the message names file and line.
    """
    return _parsed(read_text(path, error), path, None, error)


def json_lines(path: Path, error: type[ValueError] = ValueError) -> Iterator[tuple[int, Any]]:
    """What the lines of a file hold, with their numbers from 1; empty ones are passed over.

    Raises:
        error: as :func:`read_json`.
    """
    for number, text in text_lines(path, error):
        if text.strip():
            yield number, _parsed(text, path, number, error)


def _parsed(text: str, path: Path, line: int | None, error: type[ValueError]) -> Any:
    """What ``text`` holds, which is the whole file if ``line`` is None."""
    where = f"{path}{'' if line is None else f', line {line}'}"
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as reason:
        raise error(f"{path}, line {line or reason.lineno}: not JSON ({reason.msg}, column {reason.colno})") from None
    except (ValueError, RecursionError) as reason:  # a doubled name, a number of thousands of digits, endless brackets
        raise error(f"{where}: {reason}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ; the library would keep the last of two in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        first: dict[str, int] = {}
        for number, (name, _) in enumerate(pairs, 1):
            if name in first:
                raise ValueError(
                    f"an object has the name '{name}' twice, as its entries {first[name]} and {number}; keep one"
                )
            first[name] = number
    return made


def _not_text(path: Path) -> str:
    """What is said of a file that is not UTF-8: its first line that is none."""
    with path.open("rb") as file:
        if file.read(2) in _UTF_16:
            return f"{path}, line 1: not UTF-8 but UTF-16; save it as UTF-8"
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            if wrong := _ESCAPED.search(text):
                byte = ord(wrong[0]) & 0xFF
                return f"{path}, line {number}: not UTF-8 (byte 0x{byte:02x}, column {wrong.start() + 1}); {_REMEDY}"
    return f"{path}: not UTF-8; {_REMEDY}"  # it changed in between
