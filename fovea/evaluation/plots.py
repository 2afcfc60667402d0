"""The figures of a run, each a function from results to a matplotlib figure; all numbers come from traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from fovea.decoding.trace import GenerationTrace
from fovea.evaluation.history import TrainingHistory
from fovea.evaluation.results import ALL
from fovea.evaluation.style import BLUE, GREEN, INK, MUTED, ORANGE, SKY, VERMILION, house_style, tell

#: Figures of one family, as :meth:`fovea.evaluation.results.SpeedResult.figures` gives them.
Figures = Mapping[str, Any]


def acceptance_by_depth(figures: Figures) -> Figure:
    """How often a round accepts at least k drafts, and how often the k-th is accepted once k - 1 are."""
    reach = np.array(figures["reach_rate"], dtype=float)
    conditional = np.array([np.nan if rate is None else rate for rate in figures["conditional_rate"]], dtype=float)
    depth = np.arange(1, len(reach) + 1)
    with house_style():
        figure = Figure(figsize=(6.0, 3.4))
        axes = figure.subplots()
        axes.bar(depth, reach, width=0.62, color=SKY, label="of all rounds: at least k drafts accepted")
        axes.plot(
            depth, conditional[: len(depth)], "o-", color=BLUE, label="of rounds that accepted k - 1 and drafted a k-th"
        )
        for k, rate in zip(depth, reach, strict=True):
            axes.text(int(k), 0.012, f"{100 * rate:.0f}%", ha="center", fontsize=8)
        axes.set(title="Acceptance by depth", xlabel="draft depth k (tokens behind the root)", ylabel="share of rounds")
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y")
        _legend_below(figure, axes)
    return figure


def retrieval_cardinality(traces: Sequence[GenerationTrace], limits: tuple[int, int] | None = None) -> Figure:
    """How many memory entries a draft node retrieved, and how many its mass asked for, if the rule has one.

    ``limits`` are K_min and K_max.
    """
    cardinalities = np.array([pair for t in traces for r in t.rounds for pair in r.retrieval]).reshape(-1, 2)
    used, asked = cardinalities[:, 0], cardinalities[:, 1]
    edges = _integer_edges(cardinalities[cardinalities >= 0])
    with house_style():
        figure = Figure(figsize=(6.0, 3.4))
        axes = figure.subplots()
        weights = np.full(len(used), 1 / max(1, len(used)))
        axes.hist(used, edges, weights=weights, color=SKY, label=f"retrieved: K (median {_median(used)})")
        if (asked >= 0).any():
            label = f"asked for by the mass: K_raw, cut at K_max (median {_median(asked)})"
            axes.hist(asked, edges, weights=weights, histtype="step", color=VERMILION, linewidth=1.5, label=label)
        for name, side, limit in zip(("K_min", "K_max"), ("left", "right"), limits or (), strict=False):
            axes.axvline(limit, color=MUTED, linewidth=1, linestyle=":")
            place = {"transform": axes.get_xaxis_transform(), "va": "top", "ha": side}
            axes.text(limit, 1.0, f" {name} = {limit} ", color=MUTED, **place)
        axes.set(
            title=f"Retrieved evidence per draft node ({len(used):,} nodes)",
            xlabel="visual memory entries",
            ylabel="share of nodes",
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        _legend_below(figure, axes)
    return figure


def speed_by_family(figures: Mapping[str, Figures], ceiling: int | None = None) -> Figure:
    """tau, and both speedups, of every family; ``ceiling`` is the largest tau that the tree allows."""
    names = list(figures)
    rows = np.arange(len(names))
    with house_style():
        figure = Figure(figsize=(8.4, 1.5 + 0.42 * len(names)))
        left, right = figure.subplots(1, 2, sharey=True)
        tau = _column(figures, "tau")
        bars = left.barh(rows, tau, height=0.6, color=BLUE)
        left.bar_label(bars, labels=[_plain(value) for value in tau], padding=3, fontsize=8)
        left.set(title="Accept length tau", xlabel="tokens per round, bonus included", yticks=rows, yticklabels=names)
        left.set_xlim(0, max(1.0, np.nanmax(tau, initial=0)) * 1.15)
        if ceiling:
            left.set_xlim(0, ceiling * 1.05)
            left.axvline(ceiling, color=MUTED, linewidth=1, linestyle=":", label=f"tree's limit ({ceiling})")
        left.axvline(1, color=MUTED, linewidth=1)
        for offset, key, color, label in (
            (-0.17, "speedup", ORANGE, "end to end"),
            (0.17, "decode_speedup", GREEN, "without prefill"),
        ):
            values = _column(figures, key)
            bars = right.barh(rows + offset, values, height=0.32, color=color, label=label)
            right.bar_label(bars, labels=[_plain(value) for value in values], padding=3, fontsize=8)
        right.axvline(1, color=MUTED, linewidth=1)
        right.set(title="Speedup over autoregressive decoding", xlabel="times (1 = no gain)")
        right.set_xlim(0, right.get_xlim()[1] * 1.12)
        left.invert_yaxis()
        for axes in (left, right):
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
            _separate_pooled(axes, names)
        _legend_below(figure, left, right, columns=3)
    return figure


def round_time(figures: Mapping[str, Figures]) -> Figure:
    """Where a round's time goes, per family, beside the time of one autoregressive token."""
    names = list(figures)
    rows = np.arange(len(names))
    parts = (("draft", BLUE, "draft"), ("verify", ORANGE, "verify"), ("rest", MUTED, "rest (bookkeeping)"))
    with house_style():
        figure = Figure(figsize=(7.2, 1.6 + 0.42 * len(names)))
        axes = figure.subplots()
        start = np.zeros(len(names))
        for key, color, label in parts:
            width = np.array([figures[name]["round_ms"][key] or 0.0 for name in names])
            bars = axes.barh(
                rows, width, left=start, height=0.6, color=color, label=label, edgecolor="white", linewidth=1
            )
            for bar, name, value in zip(bars, names, width, strict=True):
                tell(bar, f"{name}: {label} {value:.2f} ms per round")
            start = start + width
        token = _column(figures, "ar_token_ms")
        axes.plot(token, rows, "|", color=INK, markersize=15, markeredgewidth=2, label="one autoregressive token")
        for row, total in zip(rows, start, strict=True):
            axes.text(total, int(row), f" {total:.1f} ms", va="center", fontsize=8)
        axes.set(title="Time of a round", xlabel="milliseconds per round", yticks=rows, yticklabels=names)
        axes.set_xlim(0, max(start.max(initial=0), np.nanmax(token, initial=0), 1e-9) * 1.15)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        _separate_pooled(axes, names)
        _legend_below(figure, axes, columns=4)
    return figure


def training_curves(history: TrainingHistory) -> Figure:
    """Loss terms and agreement with the teacher over optimizer steps; what was measured after each epoch."""
    with house_style():
        figure = Figure(figsize=(11.4, 3.4))
        left, middle, right = figure.subplots(1, 3)
        for name, (steps, values) in history.losses.items():
            total = name == "loss"
            label = "total" if total else name.removeprefix("loss_")
            left.plot(steps, values, color=INK if total else None, label=label, linewidth=2.2 if total else 1.4)
        if history.validation[0]:
            left.plot(*history.validation, "o--", color=INK, linewidth=1.2, label="total, held out")
        left.set(title="Loss", xlabel="optimizer step", ylabel="weighted mean over supervised rows")
        if history.losses:
            left.set_yscale("log")
            left.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
            for place in ("major", "minor"):
                getattr(left.yaxis, f"set_{place}_formatter")(FuncFormatter(lambda value, _: f"{value:g}"))
            left.legend(ncols=2)
        shades = colormaps["viridis"](np.linspace(0.0, 0.85, max(1, len(history.agreement))))
        for (name, (steps, values)), shade in zip(history.agreement.items(), shades, strict=False):
            middle.plot(steps, values, color=shade, linewidth=1.4, label=name.replace("_", " "))
        middle.set(title="Draft = teacher's choice", xlabel="optimizer step", ylabel="share of rows", ylim=(0, 1))
        middle.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if history.agreement:
            middle.legend(ncols=2)
        epochs = [epoch for epoch, _ in history.evaluations]
        for key, color, label in (
            ("tau", BLUE, "tau (tokens per round)"),
            ("speedup", ORANGE, "speedup (times)"),
            ("decode_speedup", GREEN, "decode speedup (times)"),
        ):
            values = _column({str(epoch): figures for epoch, figures in history.evaluations}, key)
            right.plot(epochs, values, "o-", color=color, label=label)
        right.axhline(1, color=MUTED, linewidth=1)
        right.set(title="Speed after each epoch", xlabel="epoch")
        right.set_ylim(bottom=0)
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend()
        for axes in (left, middle, right):
            axes.grid(axis="y")
    return figure


def _column(figures: Mapping[str, Figures], key: str) -> np.ndarray:
    """One figure of every family, NaN where it is undefined."""
    values = [figures[name][key] for name in figures]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _plain(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"


def _median(values: np.ndarray) -> str:
    return f"{np.median(values):g}" if len(values) else "-"


def _integer_edges(values: np.ndarray) -> list[float]:
    """Bin edges between integers, at most some 60 bins."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 1)
    step = max(1, -(-(high - low + 1) // 60))
    return (np.arange(low, high + step + 1, step) - 0.5).tolist()


def _separate_pooled(axes: Axes, names: Sequence[str]) -> None:
    """A line between the families and the last row, if it pools them."""
    if len(names) > 1 and names[-1] == ALL:
        axes.axhline(len(names) - 1.5, color=MUTED, linewidth=0.8)


def _legend_below(figure: Figure, *panels: Axes, columns: int = 1) -> None:
    """One legend for all ``panels``, where it never covers data."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    handles, labels = [h for handles, _ in found for h in handles], [name for _, labels in found for name in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
