"""Pictures with something on them, each its own."""

from __future__ import annotations

import numpy as np
from PIL import Image


def drawn(number: int) -> Image.Image:
    """The picture of ``number``: 160 x 120 pixels of smooth patches with grain."""
    random = np.random.default_rng(number)
    patches = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    smooth = np.asarray(patches.resize((160, 120), Image.Resampling.BICUBIC), dtype=np.int64)
    return Image.fromarray((smooth + random.integers(-9, 10, smooth.shape)).clip(0, 255).astype(np.uint8))
