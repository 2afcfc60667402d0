"""Wide and tall pictures: rows of characters in a shape that takes a LLaVA-NeXT several tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from fovea.targets.tiny.drawing import Canvas
from fovea.targets.tiny.scenes import Scene, Turn, random_string

#: Rows and columns.
SHAPES = ((1, 6), (3, 6), (6, 3), (1, 9), (3, 9), (6, 1))


@dataclass(frozen=True)
class Banner:
    """Rows of random characters that fill a picture which is no square."""

    rows: tuple[str, ...]

    @staticmethod
    def sample(rng: np.random.Generator) -> Banner:
        """One of :data:`SHAPES`."""
        rows, columns = SHAPES[rng.integers(len(SHAPES))]
        return Banner(tuple(random_string(rng, columns) for _ in range(rows)))

    def draw(self, rng: np.random.Generator) -> tuple[Image.Image, ...]:
        canvas = Canvas(len(self.rows), len(self.rows[0]), rng)
        for row, text in enumerate(self.rows):
            for column, character in enumerate(text):
                canvas.glyph((row, column), character)
        return (canvas.image(),)

    def parts(self) -> tuple[Scene, ...]:
        return (self,)

    def turns(self, rng: np.random.Generator) -> list[Turn]:
        row = int(rng.integers(len(self.rows)))
        return [
            Turn("banner", f"Read line {row + 1}.", self.rows[row]),
            Turn("banner", "Read the banner.", " ".join(self.rows[:3])),
        ]
