"""The figures of a visual-budget measurement (FOVEA, Figures 1(b) and 2), in the house style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fovea.evaluation.diagnostics import BINS, LATE_FROM
from fovea.evaluation.style import BLUE, GREEN, INK, MUTED, ORANGE, RULE, SKY, VERMILION, house_style, tell

_SUPPLY = (("under", VERMILION), ("matched", RULE), ("over", SKY))


def preferred_budgets(figures: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> Figure:
    """How often each budget is preferred, over all states; by family, whether the low one is enough."""
    names = list(figures)
    pooled = figures[names[-1]]["budget"]
    shares = {float(ratio): share for ratio, share in pooled["preferred_share"].items()}
    with house_style():
        figure = Figure(figsize=(9.6, max(3.4, 1.7 + 0.3 * len(names))))
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        places = np.arange(len(shares))
        bars = left.bar(places, list(shares.values()), width=0.64, color=BLUE)
        left.bar_label(bars, labels=[f"{share:.1%}" for share in shares.values()], padding=2, fontsize=8)
        for bar, (ratio, share) in zip(bars, shares.items(), strict=True):
            tell(bar, f"{share:.1%} of the states prefer {ratio:.0%} of the visual tokens")
        left.set(
            title=f"Preferred visual budget ({pooled['states']:,} states)",
            xlabel="share of the visual tokens shown",
            ylabel="share of states",
            xticks=places,
            xticklabels=[f"{ratio:.0%}" for ratio in shares],
        )
        left.set_ylim(0, 1.15 * max(shares.values()))
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.grid(axis="y")
        _supply(right, {name: own["budget"] for name, own in figures.items()}, settings["low"], settings["high"])
    return figure


def _supply(axes: Axes, budgets: Mapping[str, Mapping[str, Any]], low: float, high: float) -> None:
    rows, start = np.arange(len(budgets)), np.zeros(len(budgets))
    for kind, color in _SUPPLY:
        width = np.array([own[kind] / own["states"] if own["states"] else 0.0 for own in budgets.values()])
        bars = axes.barh(rows, width, left=start, height=0.66, color=color, label=kind, edgecolor="white", linewidth=1)
        for bar, name, share in zip(bars, budgets, width, strict=True):
            tell(bar, f"{name}: {share:.1%} {kind}")
        for row, (begin, share) in enumerate(zip(start, width, strict=True)):
            if share >= 0.06:
                ink = "white" if kind == "under" else INK
                axes.text(begin + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=7.5, color=ink)
        start = start + width
    labels = [f"{name} ({own['states']:,})" for name, own in budgets.items()]
    axes.set(
        title=f"{low:.0%} beside {high:.0%} of the visual tokens", xlabel="share of states", yticks=rows, xlim=(0, 1)
    )
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(budgets) > 1:
        axes.axhline(len(budgets) - 1.5, color=MUTED, linewidth=0.8)
    words = {"under": f"{low:.0%} accepts fewer drafts", "matched": "as many", "over": "more"}
    handles, kinds = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(handles, [words[kind] for kind in kinds], loc="outside lower right", ncols=3)


def demand_by_position(budget: Mapping[str, Any]) -> Figure:
    """Preferred budget, range and sensitivity in ten bins along the answer, with the early and the late mean."""
    panels = (
        ("best", "Mean preferred budget", "share of the visual tokens", BLUE),
        ("range", "Range over budgets", "accepted drafts", VERMILION),
        ("sensitive", "Sensitive to the budget", "share of states", GREEN),
    )
    counts = [one["states"] for one in budget["bins"]]
    with house_style():
        figure = Figure(figsize=(10.2, 3.3))
        for axes, (key, title, unit, color) in zip(figure.subplots(1, 3), panels, strict=True):
            means = (budget["early"][key], budget["late"][key])
            _trajectory(axes, [one[key] for one in budget["bins"]], means, color, counts=counts)
            form = "{:.2f}" if key == "range" else "{:.1%}"
            for word, mean, place in zip(("early", "late"), means, _middles_of_intervals(), strict=True):
                text = word if mean is None else f"{word}: {form.format(mean)}"
                _at_the_top(axes, place, text)
            axes.set(title=title, xlabel="position in the answer", ylabel=unit)
            if key != "range":
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        figure.supxlabel(
            f"Means of ten bins of iterations; the area of a dot is the number of its states, {min(counts):,} to "
            f"{max(counts):,}. Dashed: mean over all early and all late states.",
            fontsize=8,
            color=MUTED,
        )
    return figure


def focus_by_position(figures: Mapping[str, Any], settings: Mapping[str, Any]) -> Figure:
    """Jaccard distance of adjacent sets along the answer, of what the target attends to and what the root retrieves."""
    sources = (
        ("attended", f"target, {settings['focus_tokens']} most attended visual tokens of each step", BLUE),
        ("retrieved", "drafter, what the root of each iteration retrieves", ORANGE),
    )
    with house_style():
        figure = Figure(figsize=(6.4, 3.8))
        axes = figure.subplots()
        for key, label, color in sources:
            own = figures[key]
            if own["movements"]:
                means = own["early"], own["late"]
                early, late = ("-" if mean is None else f"{mean:.3f}" for mean in means)
                _trajectory(axes, own["bins"], means, color, f"{label}: early {early}, late {late}")
        for word, place in zip(("early", "late"), _middles_of_intervals(), strict=True):
            _at_the_top(axes, place, word)
        axes.set(
            title="Focus movement along the answer",
            xlabel="position in the answer; dashed: mean over all early and all late pairs",
            ylabel="Jaccard distance of adjacent sets",
        )
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
    return figure


def _trajectory(
    axes: Axes,
    bins: Sequence[float | None],
    means: tuple[float | None, float | None],
    color: str,
    label: str | None = None,
    counts: Sequence[int] | None = None,
) -> None:
    """The values of the bins at their middles, and a dashed line at the mean of each interval.

    Dots show by their area how many of ``counts`` are behind them.
    """
    middles = (np.arange(BINS) + 0.5) / BINS
    values = np.array([np.nan if value is None else value for value in bins], dtype=float)
    if counts is None:
        axes.plot(middles, values, "o-", color=color, label=label)
    else:
        axes.plot(middles, values, "-", color=color, label=label)
        axes.scatter(middles, values, 12 + 120 * np.array(counts) / max(1, *counts), color=color, zorder=3)
    boundary = float(LATE_FROM)
    for mean, (start, end) in zip(means, ((0.0, boundary), (boundary, 1.0)), strict=True):
        if mean is not None:
            axes.hlines(mean, start, end, color=color, linestyle="--", linewidth=1)
    axes.axvline(boundary, color=MUTED, linewidth=1, linestyle=":")
    top = max(axes.get_ylim()[1], np.nanmax(values, initial=0.0) * 1.2)
    axes.set(xlim=(0, 1), ylim=(0, top or 1.0))
    axes.grid(axis="y")


def _at_the_top(axes: Axes, place: float, text: str) -> None:
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(place, 0.97, text, transform=axes.get_xaxis_transform(), fontsize=8, ha="center", va="top", bbox=clear)


def _middles_of_intervals() -> tuple[float, float]:
    boundary = float(LATE_FROM)
    return boundary / 2, (1 + boundary) / 2
