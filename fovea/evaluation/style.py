"""How every figure of the project looks: one palette that colour-blind readers can tell apart, light axes, units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from fovea.files import replacing

#: Okabe and Ito's palette, without its yellow, which vanishes on white. The same thing has the same colour everywhere.
BLUE, ORANGE, GREEN, VERMILION, SKY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
INK, MUTED, RULE = "#222222", "#6B6B6B", "#DDDDDD"

_RC: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=[BLUE, VERMILION, GREEN, ORANGE, PINK, SKY]),
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Figures made inside look alike, whatever the user's matplotlib configuration says; it is left as it was."""
    with mpl.rc_context(_RC):
        yield


#: Begin of an artist's id that holds words; the page turns it into what a pointer is told.
TOLD = "tell:"


def tell(artist: Artist, words: str) -> None:
    """Gives ``artist`` the ``words`` that a page shows where a pointer rests on it; a PNG is the same without."""
    artist.set_gid(TOLD + words)


def save(figure: Figure, path: Path) -> Path:
    """Writes ``figure`` as PNG in the house style and returns ``path``; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with house_style(), replacing(path) as partial:
        figure.savefig(partial, format="png")
    return path
