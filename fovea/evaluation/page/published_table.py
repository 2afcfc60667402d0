"""A table of a paper: its cells as printed, and beside them those of ours, made of evaluations."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from fovea.evaluation.page.entries import Entry

HERE = (
    "The shaded columns are ours, measured on another target, other data and other hardware than the paper's: they "
    "show where a method stands here, and are no ranking against it."
)


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        name: of its files, and for trackers; no two tables have the same.
        title, source, note: its heading; paper and number; what its cells hold.
        heading: of the paper's columns, the first one naming the row.
        here: headings of our columns; empty where nothing of ours belongs to the table.
        rows: the paper's cells, then ours.
        study: name of the study of ours that it belongs to; empty if it compares methods.
    """

    name: str
    title: str
    source: str
    note: str
    heading: list[str]
    here: list[str]
    rows: list[list[str]]
    study: str = ""

    @property
    def beside(self) -> list[list[str]]:
        """Heading and rows as they are shown: names, what is ours, and what the paper has."""
        own = len(self.heading)
        body = [[row[0], *row[own:], *row[1:own]] for row in self.rows]
        return [[self.heading[0], *self.here, *self.heading[1:]], *body]

    @property
    def filled(self) -> bool:
        """Whether a row has figures of ours."""
        width = len(self.heading)
        return any(cell != "" for row in self.rows for cell in row[width:])


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table in the package data."""
    text = (files("fovea.evaluation") / "papers" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


#: Headings of what most tables have of ours.
SPEED_HERE = ["speedup here", "tau here"]


def speed_and_tau(own: Sequence[Entry]) -> list[str]:
    """Cells of the columns :data:`SPEED_HERE`."""
    return [ranged(own, lambda e: e.pooled["speedup"], "{:.2f}x"), ranged(own, lambda e: e.pooled["tau"], "{:.2f}")]


def ranged(own: Sequence[Entry], value: Callable[[Entry], float | None], form: str) -> str:
    """A cell with the ``value`` of every entry, each written in ``form``."""
    return value_or_range([value(entry) for entry in own], form)


def value_or_range(values: Sequence[float | None], form: str) -> str:
    """One value, or from the least to the most of several; empty without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    low, high = form.format(known[0]), form.format(known[-1])
    return low if len(known) == 1 else f"{low} to {high} ({len(known)})"


def pair(speedup: str | None, length: str | None, unit: str = "x") -> str:
    """Two printed figures in one cell; a dash where the paper has none."""
    if not speedup:
        return "-"
    first = f"{_padded(speedup)}{unit}"
    return f"{first} / {_padded(length)}" if length else first


def _padded(number: str) -> str:
    """A number with two decimals or more; a table that was typed lost its zeros."""
    whole, dot, decimals = number.partition(".")
    return f"{whole}.{decimals:0<2}" if (whole.isdigit() and (decimals.isdigit() or not dot)) else number


def words(name: str) -> str:
    """The name of a row in words."""
    return name.replace("_", " ")
