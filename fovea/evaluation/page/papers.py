"""The papers' tables, with our figures in the row of the method that they belong to.

What stands in a row of a paper was measured on another target, other data and other hardware than what stands beside it
here, so the two are for orientation and never for a ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fovea.evaluation.page.belonging import FULL, TRAINED, of_method, of_variant, siblings, temperature_of, whole_beside
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.papers_specvlm import branches_table, compressor_table, specvlm_tables
from fovea.evaluation.page.published_table import (
    SPEED_HERE,
    PublishedTable,
    pair,
    ranged,
    read,
    speed_and_tau,
    value_or_range,
    words,
)
from fovea.evaluation.page.studies import BUDGETS, compared
from fovea.evaluation.results import ALL


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
        *specvlm_tables(methods, entries, drawn),
        compressor_table(methods),
        branches_table(entries),
    ]


def _fovea_methods(entries: Sequence[Entry]) -> list[PublishedTable]:
    rows, tables = read("fovea_table1"), []
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == target]
        cells = {(r["method"], r["benchmark"], r["metric"]): r["value"] for r in own}
        benchmarks = list(dict.fromkeys(row["benchmark"] for row in own))
        body = []
        for method in dict.fromkeys(row["method"] for row in own):
            pairs = [pair(cells.get((method, b, "speedup")), cells.get((method, b, "tau"))) for b in benchmarks]
            body.append([method, *pairs, *speed_and_tau(of_method(entries, method))])
        tables.append(
            PublishedTable(
                f"fovea_table1_{target.lower()}", f"FOVEA and what it compares to, {target}", "FOVEA, Table 1",
                "Speedup / tau at temperature 0.", ["method", *benchmarks], SPEED_HERE, body,
            )
        )  # fmt: skip
    return tables


def _ablation(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table2_ablation")
    cells = {(row["variant"], row["benchmark"]): pair(row["speedup"], row["tau"]) for row in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    body = [
        [words(name), *(cells[name, b] for b in benchmarks), *speed_and_tau(_in_study(entries, name, names))]
        for name in names
    ]
    note = "Speedup / tau with a component left out."
    heading = ["variant", *benchmarks]
    return PublishedTable(
        "fovea_table2", "Components of FOVEA", "FOVEA, Table 2", note, heading, SPEED_HERE, body, TRAINED
    )


def _interfaces(entries: Sequence[Entry]) -> PublishedTable:
    body, rows = [], read("fovea_table3_cache")
    names = [FULL if row["interface"] == "fovea_correction" else row["interface"] for row in rows]
    for name, row in zip(names, rows, strict=True):
        own = _in_study(entries, name, names)
        paper = [row["draft_ms"], row["extra_peak_gib"], f"{row['speedup']}x", row["tau"]]
        body.append([words(row["interface"]), *paper, ranged(own, _draft_ms, "{:.2f}"), *speed_and_tau(own)])
    return PublishedTable(
        "fovea_table3",
        "Interfaces to the drafter's cache",
        "FOVEA, Table 3",
        "Milliseconds of drafting per round, peak memory above the target's in GiB, speedup, tau.",
        ["interface", "draft ms", "extra GiB", "speedup", "tau"],
        ["draft ms here", *SPEED_HERE],
        body,
        "interfaces",
    )


def _controls(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table7_retrieval_controls")
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    cells = {(r["variant"], r["benchmark"], r["metric"]): f"{float(r['mean']):+.3f} ± {r['std']}" for r in rows}
    body = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        pairs = [pair(cells[name, b, "delta_speedup"], cells[name, b, "delta_tau"], "") for b in benchmarks]
        own = [(one, whole) for one in of_variant(entries, name) if (whole := whole_beside(one, entries))]
        here = [
            value_or_range([one.pooled[key] - whole.pooled[key] for one, whole in own], "{:+.2f}")
            for key in ("speedup", "tau")
        ]
        body.append([words(name), *pairs, *here])
    note = "Difference to FOVEA: speedup / tau, mean ± standard deviation. Ours: to the one FOVEA of the same sweep."
    heading = ["variant", *benchmarks]
    here = ["Δ speedup here", "Δ tau here"]
    return PublishedTable("fovea_table7", "Retrieval controls", "FOVEA, Table 7", note, heading, here, body, "controls")


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
        body.append([*paper, *speed_and_tau(own), ranged(own, lambda e: e.pooled["share_faster_than_ar"], "{:.3f}")])
    return PublishedTable(
        "fovea_figure6",
        "How deep nodes are corrected",
        "FOVEA, Figure 6",
        "Macro means over benchmarks, and the share of samples faster than autoregressive decoding.",
        ["deepest corrected depth", "speedup", "tau", "faster than AR"],
        [*SPEED_HERE, "faster than AR here"],
        body,
        "depths",
    )


def _budgets(entries: Sequence[Entry]) -> PublishedTable:
    measured = [entry for entry in entries if entry.budgets is not None]
    body = []
    for row in read("fovea_budget_diagnostic"):
        quantity = row["quantity"]
        asked = measured if not quantity.startswith(_OCRBENCH) else [e for e in measured if _benchmark(e) == _OCRBENCH]
        values = [_BUDGET_FIGURES[quantity](entry.budgets.figures()[ALL]) for entry in asked if entry.budgets]
        digits = "{:,.0f}" if row["quantity"] == "states" else "{:.3f}"
        body.append([words(row["quantity"]), row["value"], value_or_range(values, digits)])
    return PublishedTable(
        "fovea_budgets",
        "Visual budgets",
        "FOVEA, Appendix A, Figures 1(b) and 2",
        "Shares, unless it says otherwise; a range is in draft tokens. The quantities of OCRBench are filled by "
        "evaluations on it (benchmark=ocrbench) alone.",
        ["quantity", "paper"],
        ["here"],
        body,
        BUDGETS,
    )


_OCRBENCH = "ocrbench"


def _benchmark(entry: Entry) -> str | None:
    return entry.result.settings.get("benchmark")


#: The paper's quantities -> where they are in our figures over all question families.
_BUDGET_FIGURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "states": lambda own: own["budget"]["states"],
    "preferred_25_percent": lambda own: own["budget"]["preferred_share"].get("0.25"),
    "preferred_75_percent": lambda own: own["budget"]["preferred_share"].get("0.75"),
    "preferred_100_percent": lambda own: own["budget"]["preferred_share"].get("1.0"),
    "under_supplied": lambda own: _share(own["budget"], "under"),
    "over_supplied": lambda own: _share(own["budget"], "over"),
    "matched": lambda own: _share(own["budget"], "matched"),
    **{
        f"ocrbench_{part}_{name}": lambda own, part=part, key=key: own["budget"][part][key]
        for part in ("early", "late")
        for name, key in (("mean_preferred_budget", "best"), ("mean_range", "range"), ("sensitive", "sensitive"))
    },
    "late_higher_budget_samples": lambda own: own["budget"]["late_higher_share"],
    "late_higher_focus_movement_samples": lambda own: own["attended"]["late_higher_share"],
}


def _in_study(entries: Sequence[Entry], name: str, names: Sequence[str]) -> list[Entry]:
    """The entries of a variant; of the unchanged FOVEA those beside one of the variants ``names``, if there are any."""
    own = of_variant(entries, name)
    if name != FULL:
        return own
    others = [entry for other in names if other != FULL for entry in of_variant(entries, other)]
    return [entry for entry in own if any(one is entry for other in others for one in siblings(other, own))] or own


def _draft_ms(entry: Entry) -> float | None:
    return entry.pooled["round_ms"]["draft"]


def _share(budget: Mapping[str, Any], kind: str) -> float | None:
    return budget[kind] / budget["states"] if budget["states"] else None
