"""Published traces in words and tables: ``traces.md``, ``traces.json``, and the short tables that end the job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fovea.evaluation.metrics import DEFINITIONS
from fovea.evaluation.published import SUPPORTED, JudgedFolder, JudgedMethod
from fovea.evaluation.recorded import ENTRIES, IDXS, IDXS_AND_LAST, RULES
from fovea.evaluation.results import ALL
from fovea.evaluation.table import markdown_table, plain_table
from fovea.files import write_text

REPORT = "traces"

#: What the figures mean that are not metrics of :mod:`fovea.evaluation.metrics`, or mean something else here.
_HERE = {
    "samples": "turns that both the method and the baseline answered",
    "conversations": "their question_ids",
    "rounds": "counted by the rule of the table of rules",
    "tau": "new_tokens / rounds: MMSpec's MAT",
    "tau_without_first_token": "(new_tokens - turns) / rounds: our own evaluations count like this, because the first "
    "token comes from the prefill and belongs to no round",
    "accepted_drafts_per_round": "accepted drafts / rounds, where every round was recorded; else its tokens less one",
    "recorded_accepted": "MMSpec's draft_accept_mean: mean of all entries of acceptance_length; where it is one "
    "number per turn, their mean weighted by rounds (they hardly move from turn to turn, as running means would)",
    "speedup": "wall-clock of the baseline's answers / of the method's, summed; not in MMSpec's summary",
    "throughput_ratio": "tokens per second of the method / of the baseline, each pooled: MMSpec's speedup_global. It "
    "is the speedup times the method's tokens / the baseline's",
    "mean_of_sample_throughput_ratios": "mean over turns of the same ratio: MMSpec's speedup_paired",
    "share_faster_than_ar": "turns that took strictly less time than the baseline's",
    "reach_rate": DEFINITIONS["reach_rate"] + "; where every round was recorded",
    "time_share": "parts of the wall-clock; target includes the prefill, which was not recorded apart",
    "wall_s": "seconds of the method's turns; draft_s and target_s are parts of them",
    "intervals": "95 % percentile bootstrap over question_ids, turns of one drawn together",
}

_COLUMNS = {
    "turns": ("samples", "{:d}"),
    "rounds": ("rounds", "{:d}"),
    "tau": ("tau", "{:.4f}"),
    "accepted drafts": ("accepted_drafts_per_round", "{:.4f}"),
    "recorded accepted": ("recorded_accepted", "{:.4f}"),
    "speedup": ("speedup", "{:.4f}x"),
    "throughput ratio": ("throughput_ratio", "{:.4f}x"),
    "mean of ratios": ("mean_of_sample_throughput_ratios", "{:.4f}x"),
    "faster": ("share_faster_than_ar", "{:.1%}"),
}
_SPEEDUPS = ("speedup", "throughput_ratio", "mean_of_sample_throughput_ratios")
#: Larger than what the tables round away.
_VISIBLE = 5e-5
_INTERVALS = ("tau", "accepted drafts", "speedup")


def write(folders: Sequence[JudgedFolder], run: Path) -> None:
    """Writes ``traces.md`` and ``traces.json`` into the run's folder."""
    record = {
        "targets": {
            folder.name: {
                "methods": {method.name: method.to_json() for method in folder.methods},
                "skipped": folder.skipped,
            }
            for folder in folders
        },
        "definitions": definitions(),
        "rules": RULES,
    }
    write_text(run / f"{REPORT}.json", json.dumps(record, indent=2) + "\n")
    parts = ["# Published traces by our metrics", *(part for folder in folders for part in _chapter(folder))]
    parts += ["## What the figures mean", _listed(f"**{name}**: {text}." for name, text in definitions().items())]
    write_text(run / f"{REPORT}.md", "\n\n".join(part for part in parts if part) + "\n")


def definitions() -> dict[str, str]:
    """What each figure means here."""
    return {name: DEFINITIONS[name] for name in SUPPORTED if name in DEFINITIONS} | _HERE


def print_tables(folders: Sequence[JudgedFolder], console: Console | None = None) -> None:
    """The pooled figures of each method, and how they stand to what was published."""
    console = console or Console()
    for folder in folders:
        rows = {method.name: method.figures[ALL] for method in folder.methods}
        console.print(plain_table(_rows("method", rows), f"{folder.name}, all topics"))
        console.print(plain_table(_lossless(folder.methods), "Answers and samples beside the baseline's"))
        for method in folder.methods:
            equal = [value for value in method.beside if value.equal]
            console.print(f"{method.name}: {len(equal)} of {len(method.beside)} published values are met")
        for line in (*_rules(folder.methods)[1], *_notes(folder)):
            console.print(line)


def numbers(folders: Sequence[JudgedFolder]) -> dict[str, float]:
    """The headline figures by name."""
    return {
        f"{folder.name}/{method.name}/{name}": float(method.figures[ALL][name])
        for folder in folders
        for method in folder.methods
        for name in ("tau", "speedup", "throughput_ratio")
        if method.figures[ALL][name] is not None
    }


def _chapter(folder: JudgedFolder) -> list[str]:
    pooled = {method.name: method.figures[ALL] for method in folder.methods}
    table, lines = _rules(folder.methods)
    parts = [f"## {folder.name}", markdown_table(_rows("method", pooled)), _interval_table(folder.methods)]
    parts += ["### How rounds were counted", _listed(f"`{name}`: {text}." for name, text in RULES.items())]
    parts += [markdown_table(table), _listed(lines)]
    parts += ["### Where definitions part", _listed(_differences(folder.methods))]
    parts += ["### Are the answers the baseline's?", markdown_table(_lossless(folder.methods))]
    parts += [_listed(f"{m.name}, {line}" for m in folder.methods for line in m.lossless.lines())]
    parts += [_listed(_notes(folder))]
    for method in folder.methods:
        parts += [f"### {method.name}", markdown_table(_rows("topic", method.figures))]
        if method.beside:
            heading = ["group", "published as", "here", "published", "ours", "equal"]
            body = [
                [b.group, b.column, b.figure, repr(b.published), repr(b.ours), "yes" if b.equal else "no"]
                for b in method.beside
            ]
            parts += [markdown_table([heading, *body])]
    return parts


def _rows(kind: str, figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    body = [
        [name, *("-" if own[figure] is None else form.format(own[figure]) for figure, form in _COLUMNS.values())]
        for name, own in figures.items()
    ]
    return [[kind, *_COLUMNS], *body]


def _interval_table(methods: Sequence[JudgedMethod]) -> str:
    rows = [["95% interval", *_INTERVALS]]
    for method in methods:
        cells = []
        for name in _INTERVALS:
            figure, form = _COLUMNS[name]
            bounds = method.figures[ALL]["intervals"][figure]
            cells.append(" to ".join(form.format(bound) for bound in bounds) if bounds else "-")
        rows.append([method.name, *cells])
    return markdown_table(rows)


def _rules(methods: Sequence[JudgedMethod]) -> tuple[list[list[str]], list[str]]:
    """Tau under every rule, and what follows from it in sentences."""
    rows = [["method", "counted by", *(f"tau by {rule}" for rule in RULES), "first token left out"]]
    for method in methods:
        values = [*method.tau_by_rule.values(), method.figures[ALL]["tau_without_first_token"]]
        rows.append([method.name, method.rule, *("-" if value is None else f"{value:.4f}" for value in values)])
    lines = []
    by_entries = [
        m.name for m in methods if m.rule == ENTRIES and m.tau_by_rule[ENTRIES] == m.tau_by_rule[IDXS_AND_LAST]
    ]
    for method in methods:
        published, whole = method.tau_by_rule.get(method.rule), method.tau_by_rule[IDXS_AND_LAST]
        if method.rule == IDXS and published is not None and whole is not None:
            alike = f", as for {' and '.join(by_entries)}, whose entries are idxs + 1" if by_entries else ""
            lines.append(
                f"{method.name}: its tau of {published:.4f} counts idxs as rounds; with every pass of the loop "
                f"as a round{alike}, it is {whole:.4f}"
            )
    return rows, lines


def _differences(methods: Sequence[JudgedMethod]) -> list[str]:
    """Where figures with similar names are not the same, in sentences."""
    lines = []
    for method in methods:
        own = method.figures[ALL]
        speedup, pooled, paired = (own[name] for name in _SPEEDUPS)
        lines.append(
            f"{method.name}: a speedup of {speedup:.4f} in wall-clock is {pooled:.4f} in tokens per second "
            f"(speedup_global), because its answers have {pooled / speedup:.4f} times the baseline's tokens, "
            f"and {paired:.4f} if every turn weighs the same (speedup_paired)"
        )
        recorded, counted = own["recorded_accepted"], own["accepted_drafts_per_round"]
        if abs(recorded - counted) > _VISIBLE:
            lines.append(
                f"{method.name}: the recorded accept lengths have a mean of {recorded:.4f} (draft_accept_mean), and "
                f"tokens and rounds give {counted:.4f} drafts a round; both cannot be of the same rounds"
            )
    return lines


def _lossless(methods: Sequence[JudgedMethod]) -> list[list[str]]:
    heading = ["method", "", *methods[0].lossless.rows()[0][1:]]
    return [heading, *([m.name, *row] for m in methods for row in m.lossless.rows()[1:])]


def _notes(folder: JudgedFolder) -> list[str]:
    lines = []
    if folder.skipped:
        lines.append(f"In the summary, but without an answer file here: {', '.join(folder.skipped)}")
    # The baseline's are the same for every method.
    lines += dict.fromkeys(hint for method in folder.methods for hint in method.lossless.hints)
    for method in folder.methods:
        if method.unpaired:
            lines.append(f"{method.name}: {len(method.unpaired)} turns lack a partner: {', '.join(method.unpaired)}")
        if method.unaccounted:
            lines.append(
                f"{method.name}: in {method.unaccounted} turns acceptance_length does not add up to new_tokens; their "
                "tokens are spread over the rounds"
            )
    return lines


def _listed(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)
