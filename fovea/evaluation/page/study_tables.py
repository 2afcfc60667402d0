"""The tables of the page: rows of evaluations, columns of measures, and what a reader needs to sort them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fovea.evaluation.bootstrap import RESAMPLES, tau_difference
from fovea.evaluation.page.comparison import MEASURES, Measure
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.studies import BUDGETS, EPOCHS, Study
from fovea.evaluation.results import ALL, DEFINITIONS


@dataclass(frozen=True)
class Cell:
    """A value to sort by, and how it and its confidence interval are written; ``bounds`` are those of the interval."""

    text: str
    value: float | str = ""
    interval: str = ""
    bounds: Sequence[float] = ()


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        title: what it shows; also for a screen reader.
        first: heading of the names.
        columns: headings, and what they mean.
        rows: name and cells.
    """

    title: str
    first: str
    columns: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)


def measured(
    title: str, rows: Iterable[tuple[str, Entry]], measures: Sequence[Measure], first: str = "method"
) -> Table:
    """A row per evaluation, and a column per measure that one of them has a value of."""
    rows = list(rows)
    known = [one for one in measures if any(one.value(entry) is not None for _, entry in rows)]
    body = [(name, [_cell(measure, entry) for measure in known]) for name, entry in rows]
    return Table(title, first, [(measure.name, measure.meaning) for measure in known], body)


def _cell(measure: Measure, entry: Entry) -> Cell:
    value = measure.value(entry)
    written = measure.text(entry), "" if value is None else value, measure.interval_text(entry)
    return Cell(*written, measure.bounds(entry) or ())


def _share(part: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.pooled["time_share"][part]


def _milliseconds(part: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.pooled["round_ms"][part]


_DRAFT_MS = Measure("draft ms", "{:.2f}", _milliseconds("draft"), "milliseconds of drafting per round")
#: Where the time and the memory of an answer go.
TIMES = (
    Measure("prefill", "{:.0%}", _share("prefill"), "share of the answers' time: prompt and pictures", "prefill_share"),
    Measure("draft", "{:.0%}", _share("draft"), "share of it: the proposer's work between rounds", "draft_share"),
    Measure("verify", "{:.0%}", _share("verify"), "share of it: the target's passes and choices", "verify_share"),
    Measure("rest", "{:.0%}", _share("rest"), "share of it: bookkeeping"),
    _DRAFT_MS,
    Measure("verify ms", "{:.2f}", _milliseconds("verify"), "milliseconds of verifying per round"),
    Measure("rest ms", "{:.2f}", _milliseconds("rest"), "milliseconds of bookkeeping per round"),
    Measure("AR token ms", "{:.2f}", lambda e: e.pooled["ar_token_ms"], DEFINITIONS["ar_token_ms"]),
    Measure(
        "peak memory over AR",
        "{:.3f}x",
        lambda e: e.pooled["peak_memory_ratio"],
        f"{DEFINITIONS['peak_memory_ratio']}; a CPU's allocator keeps no count",
    ),
    Measure("extra GiB", "{:.3f}", lambda e: e.pooled["extra_peak_gib"], DEFINITIONS["extra_peak_gib"]),
)
_SPEED = tuple(
    one
    for name in (
        *("answers", "tau", "accepted drafts", "speedup", "exact", "tie-explained", "unexplained"),
        *("mean of speedups", "decode speedup", "faster than AR", "drafts per round"),
    )
    for one in MEASURES
    if one.name == name
)


def acceptance(rows: Iterable[tuple[str, Entry]]) -> Table:
    """How deep the target follows the drafts: two rows per evaluation, a column per depth."""
    known = [(name, entry) for name, entry in rows if entry.pooled["rounds"]]
    depths = max((len(entry.pooled["reach_rate"]) for _, entry in known), default=0)
    columns = [
        (f"depth {k}", "share of rounds, as the row says, with k or more accepted drafts") for k in range(1, depths + 1)
    ]
    table = Table("Acceptance by depth", "method", columns)
    for name, entry in known:
        for figure, of in (("reach_rate", "all rounds"), ("conditional_rate", "rounds with k - 1 and a tree so deep")):
            pairs = zip(entry.pooled[figure], entry.pooled["intervals"][figure], strict=True)
            cells = [Cell("-") if v is None else _bounded(v, bounds) for v, bounds in pairs]
            table.rows.append((f"{name}: of {of}", [*cells, *[Cell("-")] * (depths - len(cells))]))
    return table


def _bounded(share: float, bounds: Sequence[float] | None) -> Cell:
    return Cell(f"{share:.0%}", share, "\N{EN DASH}".join(f"{b:.0%}" for b in bounds or ()), bounds or ())


def tables_of(study: Study) -> list[Table]:
    """The tables of a study."""
    if study.name == EPOCHS:
        return [_epochs(study)]
    if study.name == BUDGETS:
        return [table for table in (_budgets(study), _focus(study)) if table.rows]
    table = measured(study.title, study.rows, (*_SPEED, _DRAFT_MS), "variant")
    if any(study.wholes):
        place = next((n for n, (name, _) in enumerate(table.columns) if name == "tau"), 0) + 1
        table.columns.insert(place, ("Δ tau", "tau minus that of FOVEA in the same sweep, prompt by prompt"))
        for (_, cells), entry, whole in zip(table.rows, study.entries, study.wholes, strict=True):
            cells.insert(place, _difference(entry, whole))
    return [table]


def _difference(entry: Entry, whole: Entry | None) -> Cell:
    found = None if whole is None else difference(entry, whole)
    if found is None:
        return Cell("-")
    value, bounds = found
    return Cell(f"{value:+.2f}", value, " to ".join(f"{bound:+.2f}" for bound in bounds), bounds)


def difference(entry: Entry, whole: Entry) -> tuple[float, list[float]] | None:
    """tau of one evaluation minus that of another with its interval, over the prompts of both."""
    changed, unchanged = ([(p.speculative, p.autoregressive) for p in e.result.prompts] for e in (entry, whole))
    return tau_difference(changed, unchanged, entry.result.settings.get("resamples", RESAMPLES))


def _epochs(study: Study) -> Table:
    most = max(epoch for entry in study.entries for epoch, _ in entry.history.evaluations)
    columns = [(f"epoch {epoch}", "tau, and speedup below it") for epoch in range(1, most + 1)]
    table = Table("After each epoch", "method", columns)
    for name, entry in study.rows:
        by_epoch = dict(entry.history.evaluations)
        found = [by_epoch.get(epoch) for epoch in range(1, most + 1)]
        table.rows.append((name, [_epoch(figures) for figures in found]))
    return table


def _epoch(figures: Mapping[str, Any] | None) -> Cell:
    if figures is None or figures["tau"] is None:
        return Cell("-")
    return Cell(f"{figures['tau']:.2f}", figures["tau"], f"{figures['speedup']:.2f}x")


def _budgets(study: Study) -> Table:
    pooled = {name: entry.budgets.figures()[ALL]["budget"] for name, entry in study.rows if entry.budgets}
    ratios = list(dict.fromkeys(ratio for own in pooled.values() for ratio in own["preferred_share"]))
    columns = [("states", "draft-verify iterations about pictures")]
    columns += [(f"prefer {float(r):.0%}", "share of the states whose smallest best budget it is") for r in ratios]
    columns += [(f"accepted at {float(r):.0%}", "drafts accepted per iteration under this budget") for r in ratios]
    table = Table("Visual budgets", "method", columns)
    for name, own in pooled.items():
        cells = [Cell(f"{own['states']:,}", own["states"])]
        for key, form in (("preferred_share", "{:.1%}"), ("mean_accepted", "{:.2f}")):
            cells += [_number(own[key].get(ratio), form) for ratio in ratios]
        table.rows.append((name, cells))
    return table


def _focus(study: Study) -> Table:
    columns = [
        ("pairs", "pairs of adjacent steps, or of adjacent iterations"),
        ("distance", "mean Jaccard distance of their sets (Eq. 29)"),
        ("early", "the same before 60 % of the answer"),
        ("late", "the same from there on"),
        ("late higher", "share of the answers with both whose late mean is above the early one"),
    ]
    table = Table("Movement of the focus", "what moves", columns)
    for name, entry in study.rows:
        figures = entry.budgets.figures()[ALL] if entry.budgets else {}
        for key, words in (("attended", "what the target attends to"), ("retrieved", "what the roots retrieve")):
            if figures and (own := figures[key])["movements"]:
                cells = [Cell(f"{own['movements']:,}", own["movements"])]
                cells += [_number(own[column], "{:.3f}") for column in ("distance", "early", "late")]
                cells.append(_number(own["late_higher_share"], "{:.1%}"))
                table.rows.append((f"{name}: {words}", cells))
    return table


def _number(value: float | None, form: str) -> Cell:
    return Cell("-") if value is None else Cell(form.format(value), value)
