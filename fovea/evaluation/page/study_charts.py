"""The plots of the page's studies: what a change does to accept length and speed, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from fovea.evaluation.page.belonging import tree_of
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.studies import Study
from fovea.evaluation.results import ALL
from fovea.evaluation.style import BLUE, GREEN, MUTED, ORANGE, PINK, RULE, SKY, VERMILION, house_style, tell

_LINES = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY)
_PANELS = (("tau", "Accept length tau", "tokens per round"), ("decode_speedup", "Decode speedup", "times"))


def effects(study: Study) -> Figure:
    """tau and decode speedup of every row, with intervals; a dashed line where the first one stands."""
    known = [(name, entry) for name, entry in study.rows if entry.pooled["rounds"]]
    with house_style():
        figure = Figure(figsize=(9.4, 1.15 + 0.3 * len(known)))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (key, title, unit) in zip(panels, _PANELS, strict=True):
            axes.axvline(known[0][1].pooled[key], color=MUTED, linewidth=1, linestyle="--")
            for row, (name, entry) in enumerate(known):
                _point(axes, entry.pooled[key], row, entry.pooled["intervals"][key], name, key, across=True)
            axes.set(title=title, xlabel=unit)
            axes.grid(axis="x")
        panels[0].set_yticks(range(len(known)), [name for name, _ in known])
        panels[0].set_ylim(len(known) - 0.5, -0.5)
        for axes in panels:
            axes.tick_params(axis="y", length=0)
    return figure


def over_depth(study: Study) -> Figure:
    """tau and decode speedup over the deepest corrected depth."""
    known = [(int(name.split()[1].rstrip(",")), entry) for name, entry in study.rows if entry.pooled["rounds"]]
    with house_style():
        figure = Figure(figsize=(9.4, 3.2))
        for axes, (key, title, unit) in zip(figure.subplots(1, 2), _PANELS, strict=True):
            axes.plot([d for d, _ in known], [e.pooled[key] for _, e in known], "-", color=BLUE, linewidth=1.2)
            for depth, entry in known:
                bounds = entry.pooled["intervals"][key]
                _point(axes, depth, entry.pooled[key], bounds, f"depth {depth}", key, across=False)
            axes.set(title=title, ylabel=unit, xlabel="deepest corrected depth (-1: none)")
            axes.xaxis.set_major_locator(FixedLocator(sorted({depth for depth, _ in known})))
            axes.grid(axis="y")
    return figure


def over_trees(study: Study) -> Figure:
    """tau, decode speedup and time of a round over the nodes of the tree; a line per method, its points by shape."""
    by_method: dict[str, list[tuple[tuple[int, int, int], Entry]]] = {}
    for entry in study.entries:
        if (shape := tree_of(entry)) is not None and entry.pooled["rounds"]:
            by_method.setdefault(entry.method, []).append((shape, entry))
    nodes = sorted({shape[2] for own in by_method.values() for shape, _ in own})
    with house_style():
        figure = Figure(figsize=(9.4, 3.9))
        panels = figure.subplots(1, 2)
        for axes, (key, title, unit) in zip(panels, _PANELS, strict=True):
            for number, (method, own) in enumerate(by_method.items()):
                own.sort(key=lambda item: (item[0][2], item[0]))
                color = _LINES[number % len(_LINES)]
                x, y = [shape[2] for shape, _ in own], [entry.pooled[key] for _, entry in own]
                axes.plot(x, y, "-", color=color, linewidth=1.2, label=method)
                for (width, depth, count), entry in own:
                    name = f"{method}, {width} x {depth}, {count} nodes"
                    bounds = entry.pooled["intervals"][key]
                    _point(axes, count, entry.pooled[key], bounds, name, key, across=False, color=color)
                    if number == 0:
                        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
                        axes.annotate(f"{width}x{depth}", (count, entry.pooled[key]), fontsize=7, color=MUTED, **place)
            axes.set(title=title, ylabel=unit, xlabel="nodes of the tree, the root counted (points: width x depth)")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(nodes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def accepted_by_budget(study: Study) -> Figure:
    """Drafts accepted per iteration over the share of visual tokens, and how often each share is preferred."""
    with house_style():
        figure = Figure(figsize=(9.4, 3.4))
        left, right = figure.subplots(1, 2)
        measured = [(n, e.budgets.figures()[ALL]["budget"]) for n, e in study.rows if e.budgets is not None]
        width = 0.8 / max(1, len(measured))
        for number, (name, own) in enumerate(measured):
            color = _LINES[number % len(_LINES)]
            ratios = [float(ratio) for ratio in own["mean_accepted"]]
            means = [np.nan if mean is None else mean for mean in own["mean_accepted"].values()]
            left.plot(ratios, means, "-", color=color, linewidth=1.2, label=name)
            for ratio, mean in zip(ratios, means, strict=True):
                _point(
                    left, ratio, mean, None, f"{name}, {ratio:.0%} of the visual tokens", "", across=False, color=color
                )
            places = np.arange(len(ratios)) + (number + 0.5) * width - 0.4
            shares = [share or 0.0 for share in own["preferred_share"].values()]
            bars = right.bar(places, shares, width=0.92 * width, color=color)
            for bar, ratio, share in zip(bars, ratios, shares, strict=True):
                tell(bar, f"{name}: {share:.1%} of the states prefer {ratio:.0%}")
            right.set_xticks(np.arange(len(ratios)), [f"{ratio:.0%}" for ratio in ratios])
        left.set(title="Accepted drafts per iteration", xlabel="share of the visual tokens")
        left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.set(title="Preferred budget", xlabel="share of the visual tokens", ylabel="share of states")
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for axes in (left, right):
            axes.grid(axis="y")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _point(
    axes: Axes,
    x: float,
    y: float,
    bounds: Sequence[float] | None,
    name: str,
    key: str,
    *,
    across: bool,
    color: str = BLUE,
) -> None:
    """A point with its interval, along x if ``across``, else along y; it tells its numbers."""
    if bounds:
        along: Any = (bounds, [y, y]) if across else ([x, x], bounds)
        axes.plot(*along, color=RULE if across else color, linewidth=2.4 if across else 1, alpha=1 if across else 0.5)
    (point,) = axes.plot([x], [y], "o", color=color, markersize=6, zorder=3)
    value = x if across else y
    interval = f", 95 % interval {bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else ""
    tell(point, f"{name}: {key.replace('_', ' ')} {value:.2f}{interval}".replace(":  ", ": "))
