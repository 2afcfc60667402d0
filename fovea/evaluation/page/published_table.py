"""A table of a paper: its cells as printed, and beside them those of ours, made of evaluations."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.places import is_of, measured_at, places_of

HERE = (
    "The shaded columns are ours. Each names the benchmark and the target that it was measured on, which are the "
    "paper's only where they are called so, and the hardware was another: they show where a method stands here, and "
    "are no ranking against it."
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
        after: the paper's column that each of ours stands behind; empty for those in front of all of them.
    """

    name: str
    title: str
    source: str
    note: str
    heading: list[str]
    here: list[str]
    rows: list[list[str]]
    study: str = ""
    after: Sequence[str] = ()

    @property
    def order(self) -> list[tuple[int, bool]]:
        """Columns as they are shown behind the names: the place of each in a row, and whether it is ours."""
        width = len(self.heading)
        ours = list(enumerate(self.after, start=width))
        shown = [(place, True) for place, column in ours if column not in self.heading[1:]]
        for number, name in enumerate(self.heading[1:], start=1):
            shown += [(number, False), *((place, True) for place, column in ours if column == name)]
        return shown

    @property
    def beside(self) -> list[list[str]]:
        """Heading and rows as they are shown: names, and ours beside what the paper has."""
        return [[row[0], *(row[n] for n, _ in self.order)] for row in ([*self.heading, *self.here], *self.rows)]

    @property
    def filled(self) -> bool:
        """Whether a row has figures of ours."""
        width = len(self.heading)
        return any(cell != "" for row in self.rows for cell in row[width:])


@dataclass(frozen=True)
class Figure:
    """A figure of ours in a paper's table.

    Attributes:
        heading: what it is called; empty where the benchmark and the target say enough.
        cell: the text of the cell for some evaluations, over a family of their questions.
        after: the paper's column that it stands behind, unless there is one of its benchmark.
    """

    heading: str
    cell: Callable[[Sequence[Entry], str], str]
    after: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: its cells, the evaluations that belong to it, and the target it is about, if it is
    about one."""

    cells: list[str]
    own: Sequence[Entry]
    target: str | None = None


def with_ours(
    name: str,
    title: str,
    source: str,
    note: str,
    heading: list[str],
    rows: Sequence[Row],
    figures: Sequence[Figure],
    study: str = "",
) -> PublishedTable:
    """The table with our ``figures``: once for each benchmark and target that evaluations of its rows are of."""
    own = [[entry for entry in row.own if is_of(entry, row.target)] for row in rows]
    places = places_of((entry for entries in own for entry in entries), heading[1:])
    columns = [(place, figure) for place in places for figure in figures]
    here = [" ".join(filter(None, (figure.heading, f"here: {place.label}"))) for place, figure in columns]
    body = [
        [*row.cells, *(_cell(figure, measured_at(entries, place), place.family) for place, figure in columns)]
        for row, entries in zip(rows, own, strict=True)
    ]
    after = [place.column or figure.after for place, figure in columns]
    return PublishedTable(name, title, source, note, heading, here, body, study, after)


def _cell(figure: Figure, own: Sequence[Entry], family: str) -> str:
    """The cell, which says so if answers behind it differ from the target's own without an explanation."""
    text = figure.cell(own, family)
    lossless = not any(entry.pooled["unexplained"] for entry in own)
    return text if lossless or not text else f"{text}, not lossless"


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table in the package data."""
    text = (files("fovea.evaluation") / "papers" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def figure(heading: str, value: Callable[[Mapping[str, Any]], float | None], form: str, *, after: str = "") -> Figure:
    """A figure that is one number of each evaluation, written in ``form``; ``value`` takes the figures of a family."""

    def cell(own: Sequence[Entry], family: str) -> str:
        return value_or_range([value(entry.figures[family]) for entry in own if family in entry.figures], form)

    return Figure(heading, cell, after)


def speed_and_tau(speedup: str = "speedup", tau: str = "tau") -> list[Figure]:
    """Two columns, behind those of the paper that are called so."""
    return [
        figure("speedup", lambda own: own["speedup"], "{:.2f}x", after=speedup),
        figure("tau", lambda own: own["tau"], "{:.2f}", after=tau),
    ]


def _speed_and_tau(own: Sequence[Entry], family: str) -> str:
    known = [entry.figures[family] for entry in own if family in entry.figures]
    return pair_of([one["speedup"] for one in known], [one["tau"] for one in known])


#: Speedup and tau in one cell, as most tables of the papers have them.
SPEED_AND_TAU = Figure("", _speed_and_tau)


def pair_of(speedups: Sequence[float | None], taus: Sequence[float | None], form: str = "", unit: str = "x") -> str:
    """A cell with two figures of some evaluations, each a value or a range; ``form`` is their sign's."""
    cells = [
        value_or_range(values, f"{{:{form}.2f}}{mark}", counted=False)
        for values, mark in ((speedups, unit), (taus, ""))
    ]
    several = f" ({len(speedups)})" if len(speedups) > 1 else ""
    return " / ".join(filter(None, cells)) + several if any(cells) else ""


def value_or_range(values: Sequence[float | None], form: str, *, counted: bool = True) -> str:
    """One value, or from the least to the most of several, and how many; empty without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    low, high = form.format(known[0]), form.format(known[-1])
    if len(known) == 1:
        return low
    return f"{low} to {high} ({len(known)})" if counted else f"{low} to {high}"


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
