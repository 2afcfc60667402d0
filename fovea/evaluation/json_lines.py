"""JSON and JSON Lines from files that may be damaged: errors name file, line and field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fovea.text_files import json_lines, read_json

T = TypeVar("T")

_WORDS = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


class RecordError(ValueError):
    """A record that cannot be used; the message names its file, its line and what is missing or wrong."""


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands, in words, and the record. Empty lines are passed over.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: a line is not UTF-8 or not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give one with a JSON object per line")
    for number, record in json_lines(path, RecordError):
        where = f"{path}, line {number}"
        if not isinstance(record, dict):
            raise RecordError(f"{where}: must be a JSON object, got {type(record).__name__}")
        yield where, record


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give one with a JSON object")
    record = read_json(path, RecordError)
    if not isinstance(record, dict):
        raise RecordError(f"{path}: must be a JSON object, got {type(record).__name__}")
    return record


def made(make: Callable[[dict[str, Any]], T], record: dict[str, Any], where: str) -> T:
    """What ``make`` makes of a ``record`` that this program wrote, and that may be damaged since.

    Raises:
        RecordError: something is missing in it, or has another type.
    """
    try:
        return make(record)
    except KeyError as error:
        raise RecordError(f"{where}: {error} is missing") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"{where}: not as it was written, {error}") from None


def required(record: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    """The field ``name`` of ``record``, which must be of ``kind``; a whole number is a number, too.

    Raises:
        RecordError: it is missing, or something else.
    """
    if name not in record:
        raise RecordError(f"{where}: '{name}' is missing; there are {', '.join(map(str, record)) or 'no fields'}")
    return checked(record[name], kind, f"{where}: '{name}'")


def checked(value: Any, kind: type[T], what: str) -> T:
    """``value`` as ``kind``; ``what`` begins the error.

    Raises:
        RecordError: it is something else.
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # type: ignore[return-value]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecordError(f"{what} must be {_WORDS.get(kind, kind.__name__)}, got {value!r}")
    return value
