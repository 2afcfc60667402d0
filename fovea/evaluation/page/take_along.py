"""Every table of the page to take along: as Markdown, LaTeX and CSV, and as plain values for trackers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.evaluation.page.comparison import MEASURES, tabular
from fovea.evaluation.page.entries import Entry, labelled
from fovea.evaluation.page.papers import published_tables
from fovea.evaluation.page.published_table import HERE, PublishedTable
from fovea.evaluation.page.studies import Study, compared, find_studies
from fovea.evaluation.page.study_tables import TIMES, Cell, Table, acceptance, measured, tables_of
from fovea.evaluation.results import DEFINITIONS
from fovea.evaluation.table import markdown_table
from fovea.files import write_text


@dataclass(frozen=True)
class Taken:
    """A table.

    Attributes:
        name: of its files, and for trackers.
        title: its heading.
        text: heading and rows as they are read; intervals follow their values in brackets.
        values: heading and rows with full precision, where there is more than text; None is unknown.
        words: what its columns mean, and where it comes from.
    """

    name: str
    title: str
    text: list[list[str]]
    values: list[list[Any]]
    words: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Heading, table and words."""
        parts = [f"# {self.title}", markdown_table(self.text), "\n".join(f"- {line}" for line in self.words)]
        return "\n\n".join(filter(None, parts)) + "\n"

    def latex(self) -> str:
        """A ``tabular`` for ``booktabs`` behind title and words as comments."""
        return tabular(self.text, [self.title, *self.words])

    def comma_separated(self) -> str:
        """The values."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(self.values)
        return stream.getvalue()


@dataclass(frozen=True)
class PageTables:
    """What a page shows in tables.

    Attributes:
        main: the evaluations that are compared.
        comparison, acceptance, times: of these.
        everything: of all; None if they are the same.
        studies: each with its tables.
        published: the papers'.
    """

    main: list[Entry]
    comparison: Table
    acceptance: Table
    times: Table
    everything: Table | None
    studies: list[tuple[Study, list[Table]]]
    published: list[PublishedTable]

    @classmethod
    def over(cls, entries: Sequence[Entry]) -> PageTables:
        """The tables over ``entries``."""
        main = labelled(compared(entries))

        def table(title: str, own: Sequence[Entry], measures: Any = MEASURES) -> Table:
            return measured(title, [(entry.label, entry) for entry in own], measures)

        return cls(
            main,
            table("Comparison", main),
            acceptance([(entry.label, entry) for entry in main]),
            table("Where the time goes", main, TIMES),
            table("Every evaluation", entries) if len(main) < len(entries) else None,
            [(study, tables_of(study)) for study in find_studies(entries)],
            published_tables(entries),
        )

    def to_take(self) -> list[Taken]:
        """All of them but the comparison, each under a name of its own."""
        own = [("acceptance_by_depth", self.acceptance), ("times", self.times)]
        own = [(name, table) for name, table in own if table.rows]
        own += [("every_evaluation", self.everything)] if self.everything else []
        for study, tables in self.studies:
            several = len(tables) > 1
            own += [(f"study_{study.name}" + (f"_{_slug(t.title)}" if several else ""), t) for t in tables]
        return [*(of_table(name, table) for name, table in own), *map(of_published, self.published)]


#: Suffix of a file -> what is in it.
FORMATS = {".md": Taken.markdown, ".tex": Taken.latex, ".csv": Taken.comma_separated}


def of_table(name: str, table: Table) -> Taken:
    """A table of ours; in its values an interval takes two columns more."""
    bounded = [any(cells[place].bounds for _, cells in table.rows) for place in range(len(table.columns))]
    heading = [table.first]
    for (column, _), bounds in zip(table.columns, bounded, strict=True):
        heading += [column, *([f"{column} low", f"{column} high"] if bounds else [])]
    values: list[list[Any]] = [heading]
    for row, cells in table.rows:
        out: list[Any] = [row]
        for cell, bounds in zip(cells, bounded, strict=True):
            out += [None if cell.value == "" else cell.value, *((cell.bounds or (None, None)) if bounds else ())]
        values.append(out)
    text = [[table.first, *(column for column, _ in table.columns)]]
    text += [[row, *map(_written, cells)] for row, cells in table.rows]
    said = [f"{column}: {meaning}." for column, meaning in table.columns]
    said += [f"In brackets: {DEFINITIONS['intervals']}."] if any(bounded) else []
    return Taken(name, table.title, text, values, said)


def of_published(table: PublishedTable) -> Taken:
    """A paper's table with what is ours beside it; its cells are kept as printed."""
    words = [f"{table.source}. {table.note}", HERE.replace("shaded columns", "columns named so")]
    values: list[list[Any]] = [list(row) for row in table.beside]
    return Taken(table.name, table.title, table.beside, values, words)


def write_tables(tables: Sequence[Taken], folder: Path) -> list[Path]:
    """Writes every table in all formats into ``folder``, which is theirs; returns what was written.

    Tables of an earlier page that are not made again are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{table.name}{suffix}" for table in tables for suffix in FORMATS]
    for old in {path for suffix in FORMATS for path in folder.glob(f"*{suffix}")}.difference(written):
        old.unlink()
    for table in tables:
        for suffix, form in FORMATS.items():
            write_text(folder / f"{table.name}{suffix}", form(table))
    return written


def as_columns(tables: Sequence[Taken]) -> Mapping[str, tuple[list[str], list[list[Any]]]]:
    """Columns and rows of every table, by name."""
    return {table.name: (table.values[0], table.values[1:]) for table in tables}


def _slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower())


def _written(cell: Cell) -> str:
    return f"{cell.text} [{cell.interval}]" if cell.interval else cell.text
