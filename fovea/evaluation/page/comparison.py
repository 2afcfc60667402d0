"""All evaluations in one table, for the page and as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.preset import at
from fovea.evaluation.results import ALL, DEFINITIONS
from fovea.evaluation.table import markdown_table


@dataclass(frozen=True)
class Measure:
    """A column of the comparison.

    Attributes:
        name, form: its heading, and how a value is written.
        value: of an entry; None where it is unknown or undefined.
        meaning: its definition.
        interval: name of the figure whose confidence interval stands below it, if there is one.
    """

    name: str
    form: str
    value: Callable[[Entry], Any]
    meaning: str
    interval: str | None = None

    def text(self, entry: Entry) -> str:
        """The value as written; a dash where there is none."""
        value = self.value(entry)
        return "-" if value is None else self.form.format(value)

    def bounds(self, entry: Entry) -> list[float] | None:
        """Lower and upper bound of the confidence interval, if there is one."""
        return entry.pooled["intervals"].get(self.interval) if self.interval else None

    def interval_text(self, entry: Entry) -> str:
        """The interval as written; empty where there is none."""
        return "\N{EN DASH}".join(self.form.format(bound) for bound in self.bounds(entry) or [])


def _figure(name: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.pooled[name]


def _parameters(entry: Entry) -> float | None:
    count = entry.result.settings.get("drafter_parameters")
    return count / 1e6 if count else None


def _draft_share(entry: Entry) -> float | None:
    parts = entry.pooled["round_ms"]
    return parts["draft"] / sum(parts.values()) if entry.pooled["rounds"] else None


#: Every column; those without any value are left out of a table.
MEASURES = (
    Measure("parameters", "{:,.2f}M", _parameters, "trainable weights of the drafter, in millions; a dash: none"),
    Measure("training", "{:,.0f} s", lambda e: e.training_s, "seconds of the training steps alone, where noted"),
    Measure("answers", "{:d}", _figure("samples"), DEFINITIONS["samples"]),
    Measure(
        "not read",
        "{:d}",
        lambda e: len(e.result.failed) or None,
        "prompts that could not be read, and are in no figure; a dash: none",
    ),
    Measure("tau", "{:.2f}", _figure("tau"), DEFINITIONS["tau"], "tau"),
    Measure(
        "accepted drafts",
        "{:.2f}",
        _figure("accepted_drafts_per_round"),
        DEFINITIONS["accepted_drafts_per_round"],
        "accepted_drafts_per_round",
    ),
    Measure("speedup", "{:.2f}x", _figure("speedup"), DEFINITIONS["speedup"], "speedup"),
    # A speedup is worth what its answers are: whether they are the target's own stands beside it.
    Measure("exact", "{:d}", _figure("exact"), DEFINITIONS["exact"]),
    Measure("tie-explained", "{:d}", _figure("ties"), DEFINITIONS["ties"]),
    Measure("unexplained", "{:d}", _figure("unexplained"), DEFINITIONS["unexplained"]),
    Measure(
        "mean of speedups",
        "{:.2f}x",
        _figure("mean_of_sample_speedups"),
        DEFINITIONS["mean_of_sample_speedups"],
        "mean_of_sample_speedups",
    ),
    Measure("decode speedup", "{:.2f}x", _figure("decode_speedup"), DEFINITIONS["decode_speedup"], "decode_speedup"),
    Measure(
        "faster than AR",
        "{:.0%}",
        _figure("share_faster_than_ar"),
        DEFINITIONS["share_faster_than_ar"],
        "share_faster_than_ar",
    ),
    Measure(
        "vs. HF generate",
        "{:.2f}x",
        _figure("speedup_over_transformers"),
        DEFINITIONS["speedup_over_transformers"],
    ),
    Measure("draft share", "{:.0%}", _draft_share, "share of a round's time that the proposer takes"),
    Measure("drafts per round", "{:.1f}", _figure("drafts_per_round"), DEFINITIONS["drafts_per_round"]),
    Measure("memory", "{:.2f}x", _figure("peak_memory_ratio"), DEFINITIONS["peak_memory_ratio"]),
)

#: Of a hash, as many as tell checkpoints apart at a glance.
_DIGITS = 12
INTERVALS = "Small figures: " + DEFINITIONS["intervals"] + "."


def measures_of(entries: Sequence[Entry]) -> list[Measure]:
    """The columns that have a value for one of ``entries``."""
    return [measure for measure in MEASURES if any(measure.value(entry) is not None for entry in entries)]


def warnings(entries: Sequence[Entry]) -> list[str]:
    """Sentences about measurements whose figures are not to be trusted: answers that are not the target's own and
    nothing explains it, and jobs that did not end well."""
    out = []
    for entry in entries:
        wrong, answers = entry.pooled["unexplained"], entry.pooled["samples"]
        if wrong:
            first = next(p.comparison for p in entry.result.prompts if p.comparison.outcome == "unexplained")
            differ = "differs" if wrong == 1 else "differ"
            out.append(
                f"{entry.label} is not lossless here: {wrong:,} of {answers:,} answers {differ} from the target's own "
                f"and nothing explains it, first {first}. Its speedup counts for nothing."
            )
        elif entry.ended:
            out.append(f"{entry.label}: the job has {entry.ended}. What is shown was measured before.")
    return out


def conditions(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """What the entries were measured on: name and value, or the values if they differ."""
    out = [("target", ", ".join(dict.fromkeys(map(_target, entries))))]
    for name in ("benchmark", "device", "dtype", "cpu_threads", "max_new_tokens", "batch_size"):
        values = dict.fromkeys(str(e.result.settings[name]) for e in entries if name in e.result.settings)
        if values:
            out.append((name.replace("_", " "), ", ".join(values)))
    commits = dict.fromkeys(e.provenance["commit"][:10] for e in entries if e.provenance.get("commit"))
    if commits:
        out.append(("commit", ", ".join(commits)))
    return out


def _target(entry: Entry) -> str:
    """The target's checkpoint: its name, and what else is known of it."""
    settings = entry.result.settings
    known = {
        "": settings.get("target") if settings.get("target") != entry.target else None,
        "revision ": str(settings.get("target_revision") or "")[:_DIGITS],
        "weights ": str(settings.get("target_weights") or at(entry.provenance, "fingerprints.target") or "")[:_DIGITS],
    }
    more = ", ".join(f"{what}{value}" for what, value in known.items() if value)
    return f"{entry.target} ({more})" if more else entry.target


def text_rows(entries: Sequence[Entry]) -> list[list[str]]:
    """Heading and a row per entry; a confidence interval follows its value in brackets."""
    measures = measures_of(entries)
    rows = [["method", *(measure.name for measure in measures)]]
    for entry in entries:
        cells = []
        for measure in measures:
            interval = measure.interval_text(entry)
            cells.append(f"{measure.text(entry)} [{interval}]" if interval else measure.text(entry))
        rows.append([entry.label, *cells])
    return rows


def markdown(entries: Sequence[Entry]) -> str:
    """The comparison and its definitions in Markdown."""
    measures = measures_of(entries)
    words = [f"- **{measure.name}**: {measure.meaning}." for measure in measures]
    measured = [f"- {name}: {value}" for name, value in conditions(entries)]
    brackets = f"In brackets: {DEFINITIONS['intervals']}."
    warned = "\n".join(f"- **Warning**: {line}" for line in warnings(entries))
    parts = [
        warned,
        markdown_table(text_rows(entries)),
        "\n".join(words),
        brackets,
        "Measured on:",
        "\n".join(measured),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def latex(entries: Sequence[Entry]) -> str:
    """The comparison as a ``tabular`` for ``booktabs``; intervals stand in a smaller size behind their values."""
    comments = [f"Warning: {line}" for line in warnings(entries)]
    comments += [f"{measure.name}: {measure.meaning}" for measure in measures_of(entries)]
    return tabular(text_rows(entries), comments)


def tabular(rows: Sequence[Sequence[str]], comments: Sequence[str]) -> str:
    """Heading and rows as a ``tabular`` for ``booktabs``; what ends in brackets is an interval, and smaller."""
    heading, *body = [" & ".join(map(_latex_cell, row)) + " \\\\" for row in rows]
    lines = ["% Needs \\usepackage{booktabs}.", *(f"% {comment}" for comment in comments)]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}", "\\toprule", heading, "\\midrule", *body]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _latex_cell(text: str) -> str:
    value, bracket, interval = text.rpartition(" [")
    if bracket and interval.endswith("]"):
        return f"{_escaped(value)} {{\\scriptsize[{_escaped(interval[:-1])}]}}"
    return _escaped(text)


def comma_separated(entries: Sequence[Entry]) -> str:
    """The comparison with full precision; an interval takes two columns. Unknown values are empty."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(comparison_rows(entries))
    return stream.getvalue()


def comparison_rows(entries: Sequence[Entry]) -> list[list[Any]]:
    """Heading and a row per entry with full precision; an interval takes two columns, and is empty where there is none.

    What is unknown is None.
    """
    measures = measures_of(entries)
    heading = ["method", "folder", "target", "device", "commit"]
    for measure in measures:
        heading += [measure.name, *([f"{measure.name} low", f"{measure.name} high"] if measure.interval else [])]
    rows = [heading]
    for entry in entries:
        settings = entry.result.settings
        row = [entry.label, entry.place.as_posix(), entry.target, settings.get("device")]
        row.append(entry.provenance.get("commit"))
        for measure in measures:
            row += [measure.value(entry), *((measure.bounds(entry) or ["", ""]) if measure.interval else [])]
        rows.append(row)
    return rows


def families(entries: Sequence[Entry], figure: str) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Question families, and of every entry its value of ``figure`` in each; all pooled, last."""
    names = sorted({name for entry in entries for name in entry.figures if name != ALL})
    columns = [*names, ALL]
    return columns, [(e.label, [e.figures.get(name, {}).get(figure) for name in columns]) for e in entries]


def _escaped(text: str) -> str:
    """Text with what LaTeX would take for commands made harmless."""
    special = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    special |= {"Δ": "$\\Delta$", "±": "$\\pm$", "\N{EN DASH}": "--"}
    return "".join(special.get(c) or (f"\\{c}" if c in "&%$#_{}" else c) for c in text)
