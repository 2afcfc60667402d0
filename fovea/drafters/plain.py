"""Configs of drafters as ``config.json`` keeps them: plain types, and dataclasses out of them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``config`` with ``overrides``, nested as it is.

    Raises:
        ValueError: there is no such setting below ``prefix``; the known ones are listed.
    """
    result = dict(config)
    for name, value in overrides.items():
        if name not in config:
            raise ValueError(f"{prefix} has no setting {name!r}; choose from {sorted(config)}")
        nested = isinstance(config[name], Mapping)
        result[name] = merged(config[name], value, f"{prefix}.{name}") if nested else value
    return result


def from_plain(kind: type, record: Mapping[str, Any]) -> Any:
    """The dataclass ``kind`` from the plain types that ``asdict`` and JSON leave of it.

    Raises:
        KeyError: it has no such field.
        TypeError: a field is missing, or a value has another type.
        ValueError: the dataclass refuses a value.
    """
    hints, values = get_type_hints(kind), {}
    for name, value in record.items():
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            values[name] = from_plain(typing.cast(type, hints[name]), value)
        else:
            values[name] = _tuples(value)
        if not _fits(values[name], hints[name]):
            raise TypeError(f"{name} is {value!r}, which is of another type than it should be")
    return kind(**values)


def _tuples(value: Any) -> Any:
    """Lists as JSON has them, tuples as our dataclasses do."""
    return tuple(_tuples(v) for v in value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        parts = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is ... else parts
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    kind = origin or hint
    if isinstance(value, bool):  # an int to Python
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
