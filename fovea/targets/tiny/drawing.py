"""Pictures made of 28-pixel cells, one visual token each: shapes, characters and bars on a light ground."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

#: Side of a cell in pixels: patch 14 times merge 2, so that a cell is what one visual token covers.
CELL = 28
#: Masks are drawn this many times larger and reduced, which smooths their edges.
_OVERSAMPLING = 4

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (30, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 205, 20),
    "purple": (140, 60, 170),
    "orange": (250, 130, 20),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
#: No I and no O: they look like 1 and 0.
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
DIGITS = "0123456789"
_INK = (30, 30, 40)
_FRAME = (120, 90, 60)
#: The ground is lit from above left: it loses this much red from left to right and this much blue from top to bottom,
#: so that the look of a cell tells where it lies; Qwen2.5-VL's vision tower knows relative positions only.
_SHADE = 140
_STAR = [(14, 2), (17, 11), (26, 11), (19, 16), (22, 25), (14, 20), (6, 25), (9, 16), (2, 11), (11, 11)]
_CROSS = [
    (10, 3),
    (18, 3),
    (18, 10),
    (25, 10),
    (25, 18),
    (18, 18),
    (18, 25),
    (10, 25),
    (10, 18),
    (3, 18),
    (3, 10),
    (10, 10),
]


def _scaled(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x * _OVERSAMPLING, y * _OVERSAMPLING) for x, y in points]


def _blank(width: int = CELL) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("L", (width * _OVERSAMPLING, CELL * _OVERSAMPLING))
    return image, ImageDraw.Draw(image)


def _opacity(image: Image.Image) -> np.ndarray:
    small = image.resize((image.width // _OVERSAMPLING, CELL), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)[..., None] / 255


@cache
def _shape_mask(shape: str) -> np.ndarray:
    image, pen = _blank()
    match shape:
        case "circle":
            pen.ellipse(_scaled([(4, 4), (24, 24)]), fill=255)
        case "square":
            pen.rectangle(_scaled([(5, 5), (23, 23)]), fill=255)
        case "triangle":
            pen.polygon(_scaled([(14, 3), (26, 24), (2, 24)]), fill=255)
        case "star":
            pen.polygon(_scaled(_STAR), fill=255)
        case "cross":
            pen.polygon(_scaled(_CROSS), fill=255)
        case _:
            raise ValueError(f"no shape is called {shape!r}; there are {', '.join(SHAPES)}")
    return _opacity(image)


@cache
def _glyph_mask(text: str) -> np.ndarray:
    """One or two characters filling a cell."""
    image, pen = _blank()
    font = ImageFont.load_default(size=(26 if len(text) == 1 else 22) * _OVERSAMPLING)
    middle = CELL * _OVERSAMPLING / 2
    pen.text((middle, middle), text, fill=255, font=font, anchor="mm")
    return _opacity(image)


class Canvas:
    """A picture of ``rows`` x ``columns`` cells; places are (row, column) of a cell."""

    def __init__(self, rows: int, columns: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pixels = np.full((rows * CELL, columns * CELL, 3), 250, dtype=np.float32)
        self._pixels[..., 0] -= np.linspace(0, _SHADE, columns * CELL, dtype=np.float32)
        self._pixels[..., 2] -= np.linspace(0, _SHADE, rows * CELL, dtype=np.float32)[:, None]

    def shape(self, place: tuple[int, int], shape: str, colour: str) -> None:
        """A coloured shape, up to two pixels off the middle of its cell."""
        self._paint(place, _shape_mask(shape), COLOURS[colour], jitter=2)

    def glyph(self, place: tuple[int, int], text: str) -> None:
        """One or two characters, up to one pixel off the middle of their cell."""
        self._paint(place, _glyph_mask(text), _INK, jitter=1)

    def bar(self, foot: tuple[int, int], height: int, colour: str) -> None:
        """A bar of ``height`` half cells that stands on the lower edge of the cell ``foot``."""
        bottom, left = (foot[0] + 1) * CELL, foot[1] * CELL
        self._pixels[bottom - height * CELL // 2 : bottom, left + 5 : left + CELL - 5] = COLOURS[colour]

    def frame(self, place: tuple[int, int], columns: int) -> None:
        """The wooden frame of a sign, around ``columns`` cells from ``place`` to the right."""
        top, left = place[0] * CELL, place[1] * CELL
        sign = self._pixels[top : top + CELL, left : left + columns * CELL]
        for edge in (sign[:2], sign[-2:], sign[:, :2], sign[:, -2:]):
            edge[:] = _FRAME

    def image(self) -> Image.Image:
        """What has been drawn, RGB."""
        return Image.fromarray(np.rint(self._pixels).astype(np.uint8))

    def _paint(self, place: tuple[int, int], mask: np.ndarray, colour: tuple[int, int, int], jitter: int) -> None:
        down, right = self._rng.integers(-jitter, jitter + 1, size=2)
        shifted = np.roll(mask, (down, right), axis=(0, 1))
        top, left = place[0] * CELL, place[1] * CELL
        cell = self._pixels[top : top + CELL, left : left + CELL]
        cell += shifted * (np.asarray(colour, dtype=np.float32) - cell)
