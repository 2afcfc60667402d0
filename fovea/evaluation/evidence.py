"""Where a drafter looks: the evidence it retrieves for a few decoding steps, laid over the image (FOVEA, Figure 5)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from fovea.evaluation.style import INK, MUTED, house_style
from fovea.evaluation.trajectory import Trajectory
from fovea.targets.base import View

#: One hue from transparent to opaque: the picture shows through where nothing was retrieved.
_HEAT = LinearSegmentedColormap.from_list("evidence", [(0.84, 0.37, 0.0, 0.0), (0.84, 0.37, 0.0, 0.75)])

#: Width of a panel and most height of all rows, in inches.
_PANEL, _TALLEST = 2.0, 6.0


@dataclass(frozen=True)
class EvidenceStep:
    """What the root of one round retrieved, and what it proposed with that.

    Attributes:
        position: place in the answer of the token that is proposed; the first token, from the prefill, is at 0.
        weights: [N] retrieval weight of each memory entry, 0 where not selected; the sum is 1.
        proposed: most probable next token of the drafter.
        chosen: the target's token at that place.
    """

    position: int
    weights: np.ndarray
    proposed: int
    chosen: int


def evidence_steps(trajectory: Trajectory) -> list[EvidenceStep]:
    """A step per round whose root retrieved evidence."""
    steps = []
    for one in trajectory.rounds:
        if 0 in one.evidence:
            children = np.flatnonzero(one.tree.parents == 0)
            best = children[np.argmax(one.tree.log_probs[children])]
            chosen = trajectory.trace.tokens[one.position]
            steps.append(EvidenceStep(one.position, one.evidence[0], int(one.tree.tokens[best]), chosen))
    return steps


def heat_maps(weights: np.ndarray, grids: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Per grid, [rows, columns] weights of its cells; ``weights`` [N] run through all grids in reading order."""
    ends = np.cumsum([rows * columns for rows, columns in grids])
    if len(weights) != ends[-1]:
        raise ValueError(f"{len(weights)} memory entries do not fit the image grids {tuple(grids)}")
    return [part.reshape(grid) for part, grid in zip(np.split(weights, ends[:-1]), grids, strict=True)]


def spread(steps: Sequence[EvidenceStep], count: int) -> list[EvidenceStep]:
    """At most ``count`` of ``steps``, evenly over the answer, the first and the last among them."""
    picked = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    return [steps[index] for index in picked]


def draw_evidence(
    images: Sequence[Image.Image],
    grids: Sequence[tuple[int, int]],
    answer: Sequence[int],
    steps: Sequence[EvidenceStep],
    decode: Callable[[Sequence[int]], str],
    *,
    views: Sequence[View] | None = None,
    question: str = "",
) -> Figure:
    """A row of panels per grid: its picture, then the picture under the evidence of each of ``steps``.

    All panels share one colour scale. Above a panel stand the place in the answer, the number of entries retrieved,
    the end of the text so far, and the token that the drafter proposed with that evidence.

    Args:
        images: upright RGB pictures in the order of the prompt.
        grids: rows and columns of the grids of their visual tokens.
        answer: token ids of the whole answer.
        steps: which rounds to show; at least one.
        decode: text of token ids.
        views: what each grid shows; None for one grid per picture, over the whole of it.
        question: shown above all panels.
    """
    views = [View(number) for number in range(len(grids))] if views is None else views
    shown = [images[view.image] for view in views]
    maps = [heat_maps(step.weights, grids) for step in steps]
    scale = Normalize(0.0, max(float(step.weights.max()) for step in steps))
    height = min(_TALLEST, _PANEL * sum(image.height / image.width for image in shown))
    panels = len(steps) + 1
    heading = textwrap.wrap(question, 22 * panels)
    with house_style():
        figure = Figure(figsize=(_PANEL * panels + 0.9, height + 0.75 + 0.17 * len(heading)))
        grid = figure.subplots(
            len(shown), panels, squeeze=False, gridspec_kw={"height_ratios": [i.height / i.width for i in shown]}
        )
        for row, (image, view) in enumerate(zip(shown, views, strict=True)):
            _show(grid[row, 0], image)
            for column, step_maps in enumerate(maps, start=1):
                _show(grid[row, column], image, faded=True)
                _overlay(grid[row, column], step_maps[row], image, view, scale)
        grid[0, 0].set_title("picture", fontsize=8, fontweight="normal", color=MUTED)
        for column, step in enumerate(steps, start=1):
            caption = _caption(step, answer, decode)
            grid[0, column].set_title(caption, fontsize=8, fontweight="normal", linespacing=1.35, parse_math=False)
        bar = figure.colorbar(ScalarMappable(scale, _HEAT), ax=grid, fraction=0.02, pad=0.01, aspect=28)
        bar.set_label("retrieval weight of a cell", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        if heading:
            figure.suptitle("\n".join(heading), fontsize=9, x=0.01, ha="left", fontweight="bold", parse_math=False)
    return figure


def _show(axes: Axes, image: Image.Image, faded: bool = False) -> None:
    """The picture; ``faded`` to light greys, so that under an overlay colour means one thing only."""
    extent = (0, image.width, image.height, 0)
    if faded:
        axes.imshow(image.convert("L"), cmap="gray", vmin=0, vmax=255, alpha=0.5, extent=extent)
    else:
        axes.imshow(image, extent=extent)
    axes.set(xticks=[], yticks=[], anchor="NW")
    axes.spines[:].set(visible=True, color=MUTED, linewidth=0.6)


def _overlay(axes: Axes, weights: np.ndarray, image: Image.Image, view: View, scale: Normalize) -> None:
    """The weights of a grid's cells over the part of the picture that it shows, and a line around each selected cell.

    Line ends show nothing of the picture and are left out, and so is what lies beyond its edges.
    """
    weights = weights[:, : weights.shape[1] - view.line_ends]
    if not weights.size:
        return
    left, top, right, bottom = np.array(view.box) * np.tile((image.width, image.height), 2)
    axes.imshow(weights, cmap=_HEAT, norm=scale, extent=(left, right, bottom, top), interpolation="nearest")
    height, width = (bottom - top) / weights.shape[0], (right - left) / weights.shape[1]
    for row, column in np.argwhere(weights > 0):
        corner = (left + column * width, top + row * height)
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=INK, linewidth=0.5, alpha=0.5))
    axes.set(xlim=(0, image.width), ylim=(image.height, 0))


def _caption(step: EvidenceStep, answer: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    before = " ".join(decode(answer[: step.position]).split())
    before = f"…{before[-16:]}" if len(before) > 17 else before
    mark = "accepted" if step.proposed == step.chosen else f"target: {_quoted(decode([step.chosen]))}"
    selected = int((step.weights > 0).sum())
    return (
        f"token {step.position} · {selected} of {len(step.weights)} cells\n"
        f"after {_quoted(before)}\n"
        f"proposes {_quoted(decode([step.proposed]))}, {mark}"
    )


def _quoted(text: str) -> str:
    """Text of a token in quotes, which show its spaces; what cannot be printed is a box with a question mark."""
    text = text.replace("\n", "⏎")
    return "“" + "".join(character if character.isprintable() else "\ufffd" for character in text) + "”"
