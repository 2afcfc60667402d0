"""The table of results: one row per question family and one that pools them, for the console and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fovea.evaluation.results import ALL, DEFINITIONS


@dataclass(frozen=True)
class Column:
    """A column: its heading, the figure it shows, how, and what it means; ``more`` figures stand in the same cell."""

    heading: str
    figure: str
    form: str
    meaning: str
    more: tuple[str, ...] = ()

    def text(self, figures: Mapping[str, Any]) -> str:
        """Its cell; a dash stands for what is undefined."""
        values = [figures[name] for name in (self.figure, *self.more)]
        return "-" if None in values else self.form.format(*values)


COLUMNS = (
    Column("answers", "samples", "{:d}", "prompts answered both ways"),
    Column("tau", "tau", "{:.2f}", "tokens committed per draft-verify round, bonus token included, pooled over rounds"),
    Column("accepted drafts", "accepted_drafts_per_round", "{:.2f}", "draft tokens among them, per round"),
    Column(
        "speedup",
        "speedup",
        "{:.2f}x",
        "wall-clock of our autoregressive loop / of speculative decoding; image and prompt processing included",
    ),
    # A speedup is worth what its answers are: whether they are the target's own stands beside it.
    Column(
        "exact, tied, unexplained",
        "exact",
        "{:d}/{:d}/{:d}",
        f"{DEFINITIONS['exact']}; {DEFINITIONS['ties']}; and {DEFINITIONS['unexplained']}",
        ("ties", "unexplained"),
    ),
    Column("mean of speedups", "mean_of_sample_speedups", "{:.2f}x", "mean over answers of the speedup of each"),
    Column("decode speedup", "decode_speedup", "{:.2f}x", "speedup without image and prompt processing"),
    Column(
        "faster than AR", "share_faster_than_ar", "{:.0%}", "answers that took less time than the autoregressive ones"
    ),
    Column(
        "vs. HF generate",
        "speedup_over_transformers",
        "{:.2f}x",
        "wall-clock of transformers' generate / of speculative decoding, on the prompts measured with both",
    ),
)


def rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Heading and one row of text per family; a dash stands for what is undefined. Columns without any value go."""
    shown = [column for column in COLUMNS if any(own[column.figure] is not None for own in figures.values())]
    table = [["question family", *(column.heading for column in shown)]]
    table += [[name, *(column.text(own) for column in shown)] for name, own in figures.items()]
    return table


#: Name of the row below the pooled one, and how its cells are made of two.
INTERVAL = "95% interval"


def interval_rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Heading and one row of confidence intervals per family; empty if there is not one interval."""
    columns = [column for column in COLUMNS if any(_interval(own, column) for own in figures.values())]
    if not columns:
        return []
    heading = ["question family", *(column.heading for column in columns)]
    return [heading, *([name, *(_interval(own, c) or "-" for c in columns)] for name, own in figures.items())]


def _interval(figures: Mapping[str, Any], column: Column) -> str:
    bounds = figures.get("intervals", {}).get(column.figure)
    return " to ".join(column.form.format(bound) for bound in bounds) if bounds else ""


def console_table(figures: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """The table for a terminal; the pooled row has its confidence intervals below it."""
    heading, *body = rows(figures)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, name in enumerate(heading):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in body:
        if row[0] == ALL:
            table.add_section()
        table.add_row(*row, style="bold" if row[0] == ALL else None)
    by_heading = {column.heading: _interval(figures[ALL], column) for column in COLUMNS}
    if any(by_heading.values()):
        table.add_row(INTERVAL, *(by_heading[name] for name in heading[1:]))
    return table


def plain_table(table: Sequence[Sequence[str]], title: str) -> Table:
    """``table`` for a terminal; its first row is the heading. Where that is narrow, headings break, not figures."""
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for place, name in enumerate(table[0]):
        widest = max((len(row[place]) for row in table[1:]), default=0)
        out.add_column(name, justify="right" if place else "left", min_width=widest, overflow="fold")
    for row in table[1:]:
        out.add_row(*row)
    return out


def markdown_table(table: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """``table`` in Markdown; its first row is the heading. ``numbers`` puts all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [numbers and place > 0 for place in range(len(widths))]
    lines = []
    for row in table:
        cells = zip(row, widths, right, strict=True)
        lines.append("| " + " | ".join(f"{cell:{'>' if r else '<'}{width}}" for cell, width, r in cells) + " |")
    rules = ["-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])
