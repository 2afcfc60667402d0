"""Figures as SVG inside a page: they follow its fonts and its light or dark scheme, and weigh a few kilobytes."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib as mpl
from matplotlib.figure import Figure

from fovea.evaluation.style import BLUE, GREEN, INK, MUTED, ORANGE, PINK, RULE, SKY, TOLD, VERMILION, house_style

#: Colours of the house style -> the page's variables, whose values belong to its scheme.
COLORS = {
    "#FFFFFF": "paper",
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    VERMILION: "vermilion",
    SKY: "sky",
    PINK: "pink",
}
_VARIABLES = {color.lower(): f"var(--{name})" for color, name in COLORS.items()}
_COLOR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')
_TOLD = re.compile(rf'<g id="{TOLD}([^"]*)"([^>]*)>')
_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', re.DOTALL)


def inline_svg(figure: Figure, name: str, words: str) -> str:
    """``figure`` as an ``svg`` element; ``name`` makes its ids its own, ``words`` say what it shows to a screen reader.

    The same figure gives the same text.
    """
    stream = io.StringIO()
    with house_style(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = stream.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Matplotlib has escaped the words for an attribute, which suits an element too.
    text = _TOLD.sub(lambda found: f'<g class="told"{found[2]}><title>{found[1]}</title>', text)
    text = _COLOR.sub(lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = _REFERENCE.sub(lambda found: f"{found[1]}{name}-", text)
    size = _SIZE.search(text)
    width = float(size[1]) if size else 600.0
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    style = f'style="max-width: {width / 0.72:.0f}px" role="img" aria-label="{escape(words)}"'
    return f"<svg {spaces} {box[0] if box else ''} {style}>{body}"
