"""Dataclasses out of plain settings: every wrong name, type or value is one sentence that names the field."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


#: Words for true and false that a YAML file takes, and that a command line leaves as text.
WORDS = {"on": True, "yes": True, "off": False, "no": False}


class SettingError(ValueError):
    """A setting that cannot be used; the message names it, its value and the remedy."""


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass ``cls`` from plain ``values`` that stand at ``where`` in the configuration.

    Nested dataclasses, tuples, literals, optionals, paths and on/off are converted; ``"08"`` is no number.

    Raises:
        SettingError: for an unknown or missing field, a wrong type, or a value that the dataclass refuses.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SettingError(f"{where} has no field '{name}'{choices(str(name), known)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise SettingError(f"{where}.{name} is not set")
    converted = {name: convert(value, hints[name], f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**converted)
    except ValueError as error:
        message = str(error)
        raise SettingError(message if message.startswith(where) else f"{where}: {message}") from error


def choices(name: str, known: typing.Iterable[str]) -> str:
    """The end of a sentence about an unknown ``name``: what it may have meant, and all that there is."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    meant = f" (did you mean '{close[0]}'?)" if close else ""
    return f"{meant}; choose from: {', '.join(names)}"


def convert(value: Any, annotation: Any, where: str) -> Any:
    """``value`` as ``annotation`` wants it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        return _first_match(value, [a for a in args if a is not types.NoneType], where)
    if origin is Literal:
        if value not in args:
            raise SettingError(f"{where} is {value!r}; choose from: {', '.join(map(str, args))}")
        return value
    if is_dataclass(annotation):
        if not isinstance(value, Mapping):
            raise SettingError(f"{where} must hold named fields, got {value!r}")
        return build(typing.cast(type, annotation), value, where)
    if origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        if not isinstance(value, list | tuple):
            raise SettingError(f"{where} must be a list such as [1,2], got {value!r}")
        items = [convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
        return items if origin is list else tuple(items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise SettingError(f"{where} must hold named fields, got {value!r}")
        return {key: convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    return _scalar(value, annotation, where)


def _first_match(value: Any, alternatives: list[Any], where: str) -> Any:
    errors = []
    for alternative in alternatives:
        try:
            return convert(value, alternative, where)
        except SettingError as error:
            errors.append(error)
    raise errors[0]


def _scalar(value: Any, annotation: Any, where: str) -> Any:
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation is bool and isinstance(value, str):
        value = WORDS.get(value.lower(), value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # A bool is an int to Python, but "true" is no width.
    if isinstance(value, annotation) and not (isinstance(value, bool) and annotation is not bool):
        return value
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    raise SettingError(f"{where} must be {words.get(annotation, annotation)}, got {value!r}")
