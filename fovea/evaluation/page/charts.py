"""The plots of the page, over several evaluations; those of a single one come from the modules that report it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fovea.decoding.trace import GenerationTrace
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.style import BLUE, GREEN, INK, MUTED, ORANGE, PINK, RULE, SKY, VERMILION, house_style, tell

#: Bins of the place of a round in its answer.
BINS = 10
#: Most evaluations whose cardinalities are drawn.
MOST_CARDINALITIES = 6
_LINES = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY)
_STYLES = ("-", "--", ":")


def speed_against_tau(entries: Sequence[Entry]) -> Figure:
    """End-to-end speedup over accept length, with confidence intervals; names stand at the right."""
    known = [entry for entry in entries if entry.pooled["tau"] is not None]
    known.sort(key=lambda entry: entry.pooled["speedup"])
    tau = np.array([entry.pooled["tau"] for entry in known])
    speedup = np.array([entry.pooled["speedup"] for entry in known])
    with house_style():
        figure = Figure(figsize=(8.4, max(3.6, 1.2 + 0.24 * len(known))))
        axes = figure.subplots()
        for entry, x, y in zip(known, tau, speedup, strict=True):
            bars = entry.pooled["intervals"]
            if bars["tau"]:
                axes.plot(bars["tau"], [y, y], color=RULE, linewidth=2.4, zorder=1)
            if bars["speedup"]:
                axes.plot([x, x], bars["speedup"], color=RULE, linewidth=2.4, zorder=1)
        for entry, x, y in zip(known, tau, speedup, strict=True):
            (point,) = axes.plot([x], [y], "o", color=BLUE, markersize=6, zorder=3)
            tell(point, f"{entry.label}: tau {x:.2f}, speedup {y:.2f}x")
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.set(title="Speed against accept length", xlabel="tau (tokens per round)", ylabel="speedup (times)")
        low, high = axes.get_ylim()
        for place, entry, x, y in zip(
            _apart(speedup, low, high, 0.19 / figure.get_figheight()), known, tau, speedup, strict=True
        ):
            axes.annotate(
                f"{entry.label}  {y:.2f}x",
                (x, y),
                xytext=(1.03, (place - low) / (high - low)),
                textcoords="axes fraction",
                va="center",
                fontsize=8,
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkB": 4, "relpos": (0, 0.5)},
            )
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.grid()
    return figure


def heat_table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]], form: str, xlabel: str = ""
) -> Figure:
    """Numbers in shaded cells, a row per evaluation: darker is more, over the whole table."""
    values = np.array([[np.nan if v is None else v for v in row] for _, row in rows], dtype=float)
    high = np.nanmax(values, initial=0) or 1.0
    with house_style():
        longest = max(len(name) for name, _ in rows)
        figure = Figure(figsize=(1.2 + 0.075 * longest + 0.62 * len(columns), 1.15 + 0.26 * len(rows)))
        axes = figure.subplots()
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            share = max(0.0, value) / high
            axes.fill_between([column, column + 1], row, row + 1, color=to_rgba(BLUE), alpha=0.08 + 0.82 * share, lw=0)
            ink = "white" if share > 0.85 else INK
            axes.text(column + 0.5, row + 0.5, form.format(value), ha="center", va="center", fontsize=8, color=ink)
        axes.set(title=title, xlabel=xlabel, xlim=(0, len(columns)), ylim=(len(rows), 0))
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=8)
        axes.set_yticks(np.arange(len(rows)) + 0.5, [name for name, _ in rows], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if any(len(column) > 8 for column in columns):
            for tick in axes.get_xticklabels():
                tick.set(rotation=30, ha="right", rotation_mode="anchor")
    return figure


def acceptance_by_depth(entries: Sequence[Entry]) -> Figure:
    """Share of rounds with at least k accepted drafts, by depth k."""
    depths = max(len(entry.pooled["reach_rate"]) for entry in entries)
    rows = [(entry.label, list(entry.pooled["reach_rate"])[:depths]) for entry in entries]
    padded = [(name, [*own, *[None] * (depths - len(own))]) for name, own in rows]
    columns = [str(depth) for depth in range(1, depths + 1)]
    return heat_table("Rounds with k or more accepted drafts", columns, padded, "{:.0%}", "k, depth of the draft")


def training_curves(entries: Sequence[Entry]) -> Figure:
    """Accept length and decode speedup after each epoch of the runs that measured them."""
    with house_style():
        figure = Figure(figsize=(9.4, 3.6))
        panels = figure.subplots(1, 2)
        for axes, key, title in zip(
            panels, ("tau", "decode_speedup"), ("Accept length tau", "Decode speedup"), strict=True
        ):
            for number, entry in enumerate(entries):
                points = [(e, f[key]) for e, f in entry.history.evaluations if f[key] is not None]
                style = _STYLES[number // len(_LINES) % len(_STYLES)]
                color = _LINES[number % len(_LINES)]
                axes.plot(*zip(*points, strict=True), linestyle=style, color=color, label=entry.label)
                for epoch, value in points:
                    (point,) = axes.plot([epoch], [value], "o", color=color)
                    tell(point, f"{entry.label}, epoch {epoch}: {title.lower()} {value:.2f}")
            axes.set(title=title, xlabel="epochs of training")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def cardinalities(entries: Sequence[Entry]) -> Figure:
    """Of each evaluation that retrieved, how many memory entries a draft node took, and that along the answer."""
    shown = entries[:MOST_CARDINALITIES]
    with house_style():
        figure = Figure(figsize=(9.4, 0.5 + 2.3 * len(shown)))
        grid = figure.subplots(len(shown), 2, squeeze=False, width_ratios=(1, 1.2))
        for (left, right), entry in zip(grid, shown, strict=True):
            _distribution(left, entry)
            _along_the_answer(right, entry.result.speculative)
        grid[-1][0].set_xlabel("memory entries K of a draft node")
        grid[-1][1].set_xlabel("place of the round in its answer (0 first, 1 last)")
    return figure


def has_cardinalities(entry: Entry) -> bool:
    """Whether the nodes of an evaluation retrieved anything."""
    return any(r.retrieval for trace in entry.result.speculative for r in trace.rounds)


def _distribution(axes: Axes, entry: Entry) -> None:
    used = np.array([k for t in entry.result.speculative for r in t.rounds for k, _ in r.retrieval])
    values, counts = np.unique(used, return_counts=True)
    bars = axes.bar(values, counts / len(used), width=0.9 if len(values) > 1 else 0.4, color=SKY)
    for bar, value, count in zip(bars, values, counts, strict=True):
        tell(bar, f"K = {value}: {count:,} nodes, {count / len(used):.1%}")
    for limit in entry.result.retrieval_limits or ():
        axes.axvline(limit, color=MUTED, linewidth=1, linestyle=":")
    axes.axvline(float(np.median(used)), color=BLUE, linewidth=1.4)
    axes.set(title=f"{entry.label}: median K {np.median(used):g} of {len(used):,} nodes", ylabel="share of nodes")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")


def _along_the_answer(axes: Axes, traces: Sequence[GenerationTrace]) -> None:
    """Median and the middle 80 % of K by the place of a round in its answer."""
    bins = binned_cardinalities(traces)
    places = (np.arange(BINS) + 0.5) / BINS
    known = [(place, np.quantile(own, (0.1, 0.5, 0.9))) for place, own in zip(places, bins, strict=True) if len(own)]
    x = [place for place, _ in known]
    low, middle, high = np.array([values for _, values in known]).reshape(-1, 3).T
    axes.fill_between(x, low, high, color=SKY, alpha=0.35, linewidth=0, label="middle 80 %")
    axes.plot(x, middle, "o-", color=BLUE, label="median")
    axes.set(title="K along the answer", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", ncols=2)
    axes.grid(axis="y")


def binned_cardinalities(traces: Sequence[GenerationTrace]) -> list[np.ndarray]:
    """Cardinalities of all nodes by tenths of the answer; an answer of one round has no places, and is left out."""
    bins: list[list[int]] = [[] for _ in range(BINS)]
    for trace in traces:
        last = len(trace.rounds) - 1
        for number, one in enumerate(trace.rounds if last else ()):
            bins[min(BINS - 1, number * BINS // last)].extend(k for k, _ in one.retrieval)
    return [np.array(own) for own in bins]


def _apart(values: np.ndarray, low: float, high: float, share: float) -> np.ndarray:
    """Ascending ``values`` moved so that neighbours are ``share`` of the range apart, inside the range if they fit."""
    step = (high - low) * share
    places = values.astype(float).copy()
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + step)
    over = places[-1] - high if len(places) else 0.0
    if over > 0:
        places[-1] -= over
        for index in range(len(places) - 2, -1, -1):
            places[index] = min(places[index], places[index + 1] - step)
    return places
