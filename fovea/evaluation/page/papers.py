"""The papers' tables, with our figures in the row of the method that they belong to.

Ours stand beside the paper's column of their benchmark, or in front of all where it has none, and name their target:
they were measured on other hardware at least, so the two are for orientation and never for a ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fovea.evaluation.page.belonging import FULL, TRAINED, of_method, of_variant, siblings, temperature_of, whole_beside
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.papers_specvlm import branches_table, compressor_table, specvlm_tables
from fovea.evaluation.page.places import measured_at, places_of
from fovea.evaluation.page.published_table import (
    SPEED_AND_TAU,
    Figure,
    PublishedTable,
    Row,
    figure,
    pair,
    pair_of,
    read,
    speed_and_tau,
    value_or_range,
    with_ours,
    words,
)
from fovea.evaluation.page.studies import BUDGETS, compared
from fovea.evaluation.results import ALL, DEFINITIONS


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
            body.append(Row([method, *pairs], of_method(entries, method), target))
        name, title = f"fovea_table1_{target.lower()}", f"FOVEA and what it compares to, {target}"
        note = "Speedup / tau at temperature 0."
        table = with_ours(name, title, "FOVEA, Table 1", note, ["method", *benchmarks], body, [SPEED_AND_TAU])
        tables.append(table)
    return tables


def _ablation(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table2_ablation")
    cells = {(row["variant"], row["benchmark"]): pair(row["speedup"], row["tau"]) for row in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    body = [
        Row([words(name), *(cells[name, b] for b in benchmarks)], _in_study(entries, name, names)) for name in names
    ]
    note = "Speedup / tau with a component left out."
    title, heading = "Components of FOVEA", ["variant", *benchmarks]
    return with_ours("fovea_table2", title, "FOVEA, Table 2", note, heading, body, [SPEED_AND_TAU], TRAINED)


def _interfaces(entries: Sequence[Entry]) -> PublishedTable:
    body, rows = [], read("fovea_table3_cache")
    names = [FULL if row["interface"] == "fovea_correction" else row["interface"] for row in rows]
    for name, row in zip(names, rows, strict=True):
        own = _in_study(entries, name, names)
        paper = [row["draft_ms"], row["extra_peak_gib"], f"{row['speedup']}x", row["tau"]]
        body.append(Row([words(row["interface"]), *paper], own))
    return with_ours(
        "fovea_table3",
        "Interfaces to the drafter's cache",
        "FOVEA, Table 3",
        "Milliseconds of drafting per round, peak memory over that of paired autoregressive decoding in GiB, speedup, "
        f"tau. Ours: {DEFINITIONS['extra_peak_gib']}.",
        ["interface", "draft ms", "extra GiB", "speedup", "tau"],
        body,
        [
            figure("draft ms", lambda own: own["round_ms"]["draft"], "{:.2f}", after="draft ms"),
            figure("extra GiB", lambda own: own["extra_peak_gib"], "{:.3f}", after="extra GiB"),
            *speed_and_tau(),
        ],
        "interfaces",
    )


def _controls(entries: Sequence[Entry]) -> PublishedTable:
    rows = read("fovea_table7_retrieval_controls")
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    cells = {(r["variant"], r["benchmark"], r["metric"]): f"{float(r['mean']):+.3f} ± {r['std']}" for r in rows}
    body = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        pairs = [pair(cells[name, b, "delta_speedup"], cells[name, b, "delta_tau"], "") for b in benchmarks]
        own = [one for one in of_variant(entries, name) if whole_beside(one, entries) is not None]
        body.append(Row([words(name), *pairs], own))
    note = (
        "Difference to FOVEA: speedup / tau, mean ± standard deviation. Ours: to the one FOVEA of the same sweep, or "
        "the only one, of the same target, benchmark and settings, over the prompts of both; none without."
    )
    deltas = Figure("Δ", lambda own, _: _differences(own, entries))
    title, heading = "Retrieval controls", ["variant", *benchmarks]
    return with_ours("fovea_table7", title, "FOVEA, Table 7", note, heading, body, [deltas], "controls")


def _differences(own: Sequence[Entry], entries: Sequence[Entry]) -> str:
    """Speedup and tau of each of ``own`` minus those of the unchanged FOVEA beside it, over the prompts of both."""
    found: dict[str, list[float | None]] = {"speedup": [], "tau": []}
    for one in own:
        if (whole := whole_beside(one, entries)) is None:
            continue
        keys = {p.speculative.key for p in one.result.prompts} & {p.speculative.key for p in whole.result.prompts}
        changed, unchanged = one.pooled_over(keys), whole.pooled_over(keys)
        for key, values in found.items():
            known = None not in (changed[key], unchanged[key])
            values.append(changed[key] - unchanged[key] if known else None)
    return pair_of(found["speedup"], found["tau"], "+", "")


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
        body.append(Row(paper, own))
    return with_ours(
        "fovea_figure6",
        "How deep nodes are corrected",
        "FOVEA, Figure 6",
        "Macro means over benchmarks, and the share of samples faster than autoregressive decoding.",
        ["deepest corrected depth", "speedup", "tau", "faster than AR"],
        body,
        [
            *speed_and_tau(),
            figure("faster than AR", lambda own: own["share_faster_than_ar"], "{:.3f}", after="faster than AR"),
        ],
        "depths",
    )


def _budgets(entries: Sequence[Entry]) -> PublishedTable:
    measured = [entry for entry in entries if entry.budgets is not None]
    places, body = places_of(measured, []), []
    for row in read("fovea_budget_diagnostic"):
        quantity = row["quantity"]
        of_ocrbench = quantity.startswith(_OCRBENCH)
        digits = "{:,.0f}" if quantity == "states" else "{:.3f}"
        cells = [words(quantity), row["value"]]
        for place in places:
            own = measured_at(measured, place) if not of_ocrbench or place.benchmark == _OCRBENCH else []
            values = [_BUDGET_FIGURES[quantity](entry.budgets.figures()[ALL]) for entry in own if entry.budgets]
            cells.append(value_or_range(values, digits))
        body.append(cells)
    note = (
        "Shares, unless it says otherwise; a range is in draft tokens. The quantities of OCRBench are filled by "
        "evaluations on it (benchmark=ocrbench) alone."
    )
    here = [f"here: {place.label}" for place in places]
    title, source, after = "Visual budgets", "FOVEA, Appendix A, Figures 1(b) and 2", ["paper"] * len(places)
    return PublishedTable("fovea_budgets", title, source, note, ["quantity", "paper"], here, body, BUDGETS, after)


_OCRBENCH = "ocrbench"


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


def _share(budget: Mapping[str, Any], kind: str) -> float | None:
    return budget[kind] / budget["states"] if budget["states"] else None
