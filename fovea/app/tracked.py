"""Finished evaluations as trackers see them: tables of plain values, and pages that tell no folder of the machine."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from callbacks.speed_logging import answer_table
from fovea.app.untold import Untold
from fovea.evaluation.bootstrap import BY_DEPTH, FIGURES
from fovea.evaluation.budget_results import BUDGET, BudgetResult
from fovea.evaluation.page.build import page_plots
from fovea.evaluation.page.comparison import comparison_rows
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.take_along import PageTables
from fovea.evaluation.results import SpeedResult
from fovea.evaluation.style import house_style

#: Columns and rows.
Columns = tuple[list[str], list[list[Any]]]

_FIGURES = (
    *("samples", "rounds", "new_tokens", "tau", "accepted_drafts_per_round", "speedup", "mean_of_sample_speedups"),
    *("decode_speedup", "speedup_over_transformers", "share_faster_than_ar", "drafts_per_round", "draft_acceptance"),
    *("peak_memory_ratio", "ar_token_ms", "exact", "ties", "unexplained"),
)


def figures_table(result: SpeedResult) -> Columns:
    """A row per question family and one that pools them: figures, parts of the time, and confidence intervals."""
    figures = result.figures()
    parts = [(group, part) for group in ("time_share", "round_ms") for part in _first(figures)[group]]
    bounded = FIGURES
    columns = ["family", *_FIGURES, *(f"{group}_{part}" for group, part in parts)]
    columns += [f"{name}_{end}" for name in bounded for end in ("low", "high")]
    rows = []
    for family, own in figures.items():
        bounds = [bound for name in bounded for bound in own["intervals"][name] or (None, None)]
        rows.append([family, *(own[name] for name in _FIGURES), *(own[g][p] for g, p in parts), *bounds])
    return columns, _numbers(rows)


def acceptance_table(result: SpeedResult) -> Columns:
    """A row per question family and depth of the draft: shares of rounds that accept so many, and their intervals."""
    ends = ("", "_low", "_high")
    columns = ["family", "depth", *(f"{figure}{end}" for figure in BY_DEPTH for end in ends)]
    rows = []
    for family, own in result.figures().items():
        for k in range(len(own["reach_rate"])):
            cells = [cell for f in BY_DEPTH for cell in (own[f][k], *(own["intervals"][f][k] or (None, None)))]
            rows.append([family, k + 1, *cells])
    return columns, _numbers(rows)


def budget_tables(result: BudgetResult) -> dict[str, Columns]:
    """Visual budgets and movement of the focus, a row per question family and one that pools them."""
    figures = result.figures()
    ratios = [str(ratio) for ratio in result.ratios]
    budgets = ["family", "states", "under", "matched", "over", "preferred_mean", "range", "sensitive"]
    budgets += [f"{name}_{ratio}" for name in ("preferred", "accepted") for ratio in ratios]
    focus = ["family", "focus", "movements", "distance", "early", "late", "late_higher_share"]
    by_budget, by_focus = [], []
    for family, own in figures.items():
        states = own["budget"]
        counts = [states[name] for name in ("states", "under", "matched", "over")]
        means = [states["all"][name] for name in ("best", "range", "sensitive")]
        shares = [states[name].get(ratio) for name in ("preferred_share", "mean_accepted") for ratio in ratios]
        by_budget.append([family, *counts, *means, *shares])
        for name in ("attended", "retrieved"):
            by_focus.append([family, name, *(own[name][column] for column in focus[2:])])
    return {"budgets": (budgets, _numbers(by_budget)), "focus": (focus, _numbers(by_focus))}


def evaluation_tables(result: SpeedResult, folder: Path) -> dict[str, Columns]:
    """Every table of the evaluation in ``folder``, by name."""
    tables = {"figures": figures_table(result), "acceptance": acceptance_table(result), "answers": answer_table(result)}
    if (folder / BUDGET).is_file():
        tables |= budget_tables(BudgetResult.load(folder))
    return tables


def sweep_tables(
    summary: Sequence[Sequence[str]], entries: Sequence[Entry], page: PageTables | None, untold: Untold
) -> dict[str, Columns]:
    """The summary of a sweep, heading first, and all tables of its page: ours with their intervals, the papers'.

    ``page`` are those over ``entries``; None without any.
    """
    heading, *jobs = summary
    tables = {"summary": (list(heading), [[untold.text(cell) for cell in row] for row in jobs])}
    if page is not None:
        columns, *rows = comparison_rows(entries)
        tables["comparison"] = columns, _numbers(rows)
        for taken in page.to_take():
            columns, *rows = taken.values
            told = [[untold.text(v) if isinstance(v, str) else v for v in row] for row in rows]
            tables[taken.name] = columns, _numbers(told)
    return tables


def plots_for_wandb(page: PageTables, untold: Untold, prefix: str) -> dict[str, Any]:
    """The plots of a page as pictures, each under the ``prefix``."""
    import wandb

    out: dict[str, Any] = {}
    for name, caption, figure in page_plots(page):
        stream = io.BytesIO()
        with house_style():
            figure.savefig(stream, format="png")
        stream.seek(0)
        out[f"{prefix}/{name}"] = wandb.Image(Image.open(stream), caption=untold.text(caption))
    return out


def tables_for_wandb(tables: Mapping[str, Columns], prefix: str) -> dict[str, Any]:
    """``tables`` as W&B takes them, each under the ``prefix``."""
    import wandb

    out: dict[str, Any] = {}
    for name, (columns, rows) in tables.items():
        plain: dict[str, Any] = {"columns": columns, "data": rows}  # of any type
        out[f"{prefix}/{name}"] = wandb.Table(**plain)
    return out


def page_for_wandb(page: Path, untold: Untold) -> Any:
    """The page at ``page`` as W&B shows it: complete, and without folders of this machine."""
    import wandb

    return wandb.Html(io.StringIO(untold.text(page.read_text(encoding="utf-8"))), inject=False)


def _first(figures: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(iter(figures.values()))


def _numbers(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Whole numbers as fractions, because a column of W&B has one type; nothing for what is unknown."""
    return [
        [None if v in (None, "") else float(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in row]
        for row in rows
    ]
