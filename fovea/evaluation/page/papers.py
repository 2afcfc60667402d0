"""The papers' tables, with our figures in the row of the method that they belong to.

What stands in a row of a paper was measured on another target, other data and other hardware than what stands beside it
here, so the two are for orientation and never for a ranking.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fovea.evaluation.page.belonging import FULL, TRAINED, of_method, of_variant, siblings, temperature_of, whole_beside
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.studies import BUDGETS, EPOCHS, compared
from fovea.evaluation.results import ALL

HERE = (
    "The shaded columns are ours, measured on another target, other data and other hardware than the paper's: they "
    "show where a method stands here, and are no ranking against it."
)


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        title, source, note: its heading; paper and number; what its cells hold.
        heading: of the paper's columns, the first one naming the row.
        here: headings of our columns; empty where nothing of ours belongs to the table.
        rows: the paper's cells, then ours.
        study: name of the study of ours that it belongs to; empty if it compares methods.
    """

    title: str
    source: str
    note: str
    heading: list[str]
    here: list[str]
    rows: list[list[str]]
    study: str = ""

    @property
    def filled(self) -> bool:
        """Whether a row has figures of ours."""
        width = len(self.heading)
        return any(cell != "" for row in self.rows for cell in row[width:])


def published_tables(entries: Sequence[Entry]) -> list[PublishedTable]:
    """The tables of both papers, beside the figures of ``entries``."""
    entries, drawn = [e for e in entries if not temperature_of(e)], [e for e in entries if temperature_of(e) == 1]
    methods = compared(entries) if entries else []
    return [
        *_fovea_methods(methods),
        _ablation(entries),
        _interfaces(entries),
        _controls(entries),
        _depths(entries),
        _budgets(entries),
        *_specvlm(methods, entries, drawn),
        _compressor(methods),
    ]


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table in the package data."""
    text = (files("fovea.evaluation") / "papers" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _fovea_methods(entries: Sequence[Entry]) -> list[PublishedTable]:
    rows, tables = read("fovea_table1"), []
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == target]
        cells = {(r["method"], r["benchmark"], r["metric"]): r["value"] for r in own}
        benchmarks = list(dict.fromkeys(row["benchmark"] for row in own))
        body = []
        for method in dict.fromkeys(row["method"] for row in own):
            pairs = [_pair(cells.get((method, b, "speedup")), cells.get((method, b, "tau"))) for b in benchmarks]
            body.append([method, *pairs, *_speed(of_method(entries, method))])
        tables.append(
            PublishedTable(
                f"FOVEA and what it compares to, {target}", "FOVEA, Table 1", "Speedup / tau at temperature 0.",
                ["method", *benchmarks], _SPEED_HERE, body,
            )
        )  # fmt: skip
    return tables


def _ablation(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table2_ablation")
    cells = {(row["variant"], row["benchmark"]): _pair(row["speedup"], row["tau"]) for row in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    body = [
        [_words(name), *(cells[name, b] for b in benchmarks), *_speed(_in_study(entries, name, names))]
        for name in names
    ]
    note = "Speedup / tau with a component left out."
    heading = ["variant", *benchmarks]
    return PublishedTable("Components of FOVEA", "FOVEA, Table 2", note, heading, _SPEED_HERE, body, TRAINED)


def _interfaces(entries: Sequence[Entry]) -> PublishedTable:
    body, rows = [], read("fovea_table3_cache")
    names = [FULL if row["interface"] == "fovea_correction" else row["interface"] for row in rows]
    for name, row in zip(names, rows, strict=True):
        own = _in_study(entries, name, names)
        paper = [row["draft_ms"], row["extra_peak_gib"], f"{row['speedup']}x", row["tau"]]
        body.append([_words(row["interface"]), *paper, _ranged(own, _draft_ms, "{:.2f}"), *_speed(own)])
    return PublishedTable(
        "Interfaces to the drafter's cache",
        "FOVEA, Table 3",
        "Milliseconds of drafting per round, peak memory above the target's in GiB, speedup, tau.",
        ["interface", "draft ms", "extra GiB", "speedup", "tau"],
        ["draft ms here", *_SPEED_HERE],
        body,
        "interfaces",
    )


def _controls(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table7_retrieval_controls")
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    cells = {(r["variant"], r["benchmark"], r["metric"]): f"{float(r['mean']):+.3f} ± {r['std']}" for r in rows}
    body = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        pairs = [_pair(cells[name, b, "delta_speedup"], cells[name, b, "delta_tau"], "") for b in benchmarks]
        own = [(one, whole) for one in of_variant(entries, name) if (whole := whole_beside(one, entries))]
        here = [
            _range([one.pooled[key] - whole.pooled[key] for one, whole in own], "{:+.2f}") for key in ("speedup", "tau")
        ]
        body.append([_words(name), *pairs, *here])
    note = "Difference to FOVEA: speedup / tau, mean ± standard deviation. Ours: to the one FOVEA of the same sweep."
    heading = ["variant", *benchmarks]
    here = ["Δ speedup here", "Δ tau here"]
    return PublishedTable("Retrieval controls", "FOVEA, Table 7", note, heading, here, body, "controls")


def _depths(entries: Sequence[Entry]) -> PublishedTable:
    body = []
    for row in read("fovea_figure6_correction_depth"):
        own = of_variant(entries, f"depth {row['max_correction_depth']}")
        paper = [
            row["max_correction_depth"],
            f"{row['macro_speedup']}x",
            row["macro_tau"],
            row["fraction_faster_than_ar"],
        ]
        body.append([*paper, *_speed(own), _ranged(own, lambda e: e.pooled["share_faster_than_ar"], "{:.3f}")])
    return PublishedTable(
        "How deep nodes are corrected",
        "FOVEA, Figure 6",
        "Macro means over benchmarks, and the share of samples faster than autoregressive decoding.",
        ["deepest corrected depth", "speedup", "tau", "faster than AR"],
        [*_SPEED_HERE, "faster than AR here"],
        body,
        "depths",
    )


def _budgets(entries: Sequence[Entry]) -> PublishedTable:
    measured = [entry for entry in entries if entry.budgets is not None]
    body = []
    for row in read("fovea_budget_diagnostic"):
        path = _BUDGET_FIGURES.get(row["quantity"])
        values = [] if path is None else [path(entry.budgets.figures()[ALL]) for entry in measured if entry.budgets]
        digits = "{:,.0f}" if row["quantity"] == "states" else "{:.3f}"
        body.append([_words(row["quantity"]), row["value"], _range(values, digits)])
    return PublishedTable(
        "Visual budgets",
        "FOVEA, Appendix A, Figures 1(b) and 2",
        "Shares, unless it says otherwise. The quantities of OCRBench and of samples have no counterpart of ours where "
        "the column is blank.",
        ["quantity", "paper"],
        ["here"],
        body,
        BUDGETS,
    )


#: The paper's quantities -> where they are in our figures over all question families.
_BUDGET_FIGURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "states": lambda own: own["budget"]["states"],
    "preferred_25_percent": lambda own: own["budget"]["preferred_share"].get("0.25"),
    "preferred_75_percent": lambda own: own["budget"]["preferred_share"].get("0.75"),
    "preferred_100_percent": lambda own: own["budget"]["preferred_share"].get("1.0"),
    "under_supplied": lambda own: _share(own["budget"], "under"),
    "over_supplied": lambda own: _share(own["budget"], "over"),
    "matched": lambda own: _share(own["budget"], "matched"),
    "late_higher_budget_samples": lambda own: own["budget"]["late_higher_share"],
    "late_higher_focus_movement_samples": lambda own: own["attended"]["late_higher_share"],
}


def _specvlm(methods: Sequence[Entry], greedy: Sequence[Entry], drawn: Sequence[Entry]) -> list[PublishedTable]:
    """SpecVLM's tables: of ``methods``, of what was ``drawn`` at temperature 1, and after each epoch of training."""
    rows, tables = read("specvlm_tables"), []
    for number, temperature in dict.fromkeys((row["table"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["table"], row["temperature"]) == (number, temperature)]
        by_epoch = len({row["epoch"] for row in own}) > 1 and len({row["benchmark"] for row in own}) == 1
        column = "epoch" if by_epoch else "benchmark"
        names = list(dict.fromkeys(row[column] for row in own))
        cells = {(r["target"], r["method"], r[column], r["metric"]): r["value"] for r in own}
        body = []
        for target, method in dict.fromkeys((row["target"], row["method"]) for row in own):
            at = (target, method)
            pairs = [_pair(cells.get((*at, n, "speedup")), cells.get((*at, n, "accept_length"))) for n in names]
            found = of_method(drawn if temperature == "1" else methods, method)
            here = _by_epoch(of_method(greedy, method), names) if by_epoch else _speed(found)
            body.append([f"{method}, {target}", *pairs, *here])
        where = f"{own[0]['hardware']}, temperature {temperature}"
        title = f"SpecVLM after each epoch on {own[0]['benchmark']}" if by_epoch else "SpecVLM by benchmark"
        headings = [f"epoch {name}" if by_epoch else name for name in names]
        here = [f"{name} here" for name in headings] if by_epoch else _SPEED_HERE
        note = "Speedup / accept length."
        source, study = f"SpecVLM, Table {number}", EPOCHS if by_epoch else ""
        tables.append(PublishedTable(f"{title} ({where})", source, note, ["method", *headings], here, body, study))
    return tables


def _by_epoch(own: Sequence[Entry], epochs: Sequence[str]) -> list[str]:
    """Speedup and tau after each of the ``epochs``, of the evaluation whose training measured most of them."""
    measured = max((dict(entry.history.evaluations) for entry in own), key=len, default={})
    found = [measured.get(int(epoch)) for epoch in epochs]
    return ["" if one is None or one["tau"] is None else f"{one['speedup']:.2f}x / {one['tau']:.2f}" for one in found]


def _compressor(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("specvlm_table3_compressor")
    cells = {(r["configuration"], r["benchmark"]): _pair(r["speedup"], r["accept_length"]) for r in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    body = [
        [name, *(cells[name, b] for b in benchmarks), *_speed(of_method(entries, name))]
        for name in dict.fromkeys(row["configuration"] for row in rows)
    ]
    note = "Speedup / accept length, by how the gate uses its branches."
    return PublishedTable("SpecVLM's compressor", "SpecVLM, Table 3", note, ["kind", *benchmarks], _SPEED_HERE, body)


def _in_study(entries: Sequence[Entry], name: str, names: Sequence[str]) -> list[Entry]:
    """The entries of a variant; of the unchanged FOVEA those beside one of the variants ``names``, if there are any."""
    own = of_variant(entries, name)
    if name != FULL:
        return own
    others = [entry for other in names if other != FULL for entry in of_variant(entries, other)]
    return [entry for entry in own if any(one is entry for other in others for one in siblings(other, own))] or own


_SPEED_HERE = ["speedup here", "tau here"]


def _speed(own: Sequence[Entry]) -> list[str]:
    return [_ranged(own, lambda e: e.pooled["speedup"], "{:.2f}x"), _ranged(own, lambda e: e.pooled["tau"], "{:.2f}")]


def _ranged(own: Sequence[Entry], value: Callable[[Entry], float | None], form: str) -> str:
    return _range([value(entry) for entry in own], form)


def _range(values: Sequence[float | None], form: str) -> str:
    """One value, or from the least to the most of several; empty without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    low, high = form.format(known[0]), form.format(known[-1])
    return low if len(known) == 1 else f"{low} to {high} ({len(known)})"


def _draft_ms(entry: Entry) -> float | None:
    return entry.pooled["round_ms"]["draft"]


def _share(budget: Mapping[str, Any], kind: str) -> float | None:
    return budget[kind] / budget["states"] if budget["states"] else None


def _pair(speedup: str | None, length: str | None, unit: str = "x") -> str:
    if not speedup:
        return "-"
    first = f"{_padded(speedup)}{unit}"
    return f"{first} / {_padded(length)}" if length else first


def _padded(number: str) -> str:
    """A number with two decimals or more; a table that was typed lost its zeros."""
    whole, dot, decimals = number.partition(".")
    return f"{whole}.{decimals:0<2}" if (whole.isdigit() and (decimals.isdigit() or not dot)) else number


def _words(name: str) -> str:
    return name.replace("_", " ")
