"""Prints of pictures: one of the pixels, and one of 64 bits that stays about the same when a picture is re-encoded.

The second is a perceptual hash by cosine transform (Zauner, Implementation and Benchmarking of Perceptual Image Hash
Functions, 2010): signs of the 8 x 8 lowest frequencies of the grey picture at 32 x 32 pixels, about their median.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fovea.targets.conversation import ImageSource, StoredImage
from fovea.targets.images import open_image

_SIDE, _LOW = 32, 8
#: Rows of an orthonormal cosine transform, [_LOW, _SIDE].
_COSINES = np.sqrt(2 / _SIDE) * np.cos(np.pi / _SIDE * np.outer(np.arange(_LOW), np.arange(_SIDE) + 0.5))
_COSINES[0] /= np.sqrt(2)
#: Grey levels times pixels that a frequency has by itself, from rounding and encoding.
_NOISE = 2.0
#: Frequencies, of the 64, that must stand out of it; fewer are those of plain pictures, stripes and ramps.
_ENOUGH = 32
#: Bits in which the prints of one picture may differ; those of two differ in about 32.
DISTANCE = 6
#: Training pictures that are compared at once.
_BLOCK = 64


@dataclass(frozen=True)
class Print:
    """What is known of a picture.

    Attributes:
        pixels: 16 hex digits over size and upright RGB pixels, however they are encoded.
        look: 64 bits; None of a picture with next to nothing on it, which would look like all others of its kind.
    """

    pixels: str
    look: int | None


class Prints:
    """Prints of pictures; those in files and tables are opened once."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], Print] = {}

    def __call__(self, image: ImageSource) -> Print:
        """The print of ``image``.

        Raises:
            BrokenImageError: it cannot be decoded.
        """
        if not isinstance(image, Path | StoredImage):  # one in memory has no name; one written out is its own
            return _print(open_image(image))
        name = (type(image), str(image))
        if name not in self._known:
            self._known[name] = _print(open_image(image))
        return self._known[name]


def _print(image: Image.Image) -> Print:
    pixels = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:16]
    return Print(pixels, _look(image))


def _look(image: Image.Image) -> int | None:
    grey = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS, reducing_gap=3)
    frequencies = (_COSINES @ np.asarray(grey, dtype=np.float64) @ _COSINES.T).ravel()
    if (np.abs(frequencies) > _NOISE).sum() < _ENOUGH:
        return None
    bits = np.packbits(frequencies > np.median(frequencies))
    return int.from_bytes(bits.tobytes(), "big")


def alike(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Places of all looks of ``first`` and ``second`` that differ in at most :data:`DISTANCE` bits, and in how many.

    In order. 57,671 against 30,000 take some 10 to 30 seconds and 20 MB.
    """
    ours, theirs = np.array(first, dtype=np.uint64), np.array(second, dtype=np.uint64)
    for start in range(0, len(ours), _BLOCK):
        bits = np.bitwise_count(ours[start : start + _BLOCK, None] ^ theirs)
        for row, column in np.argwhere(bits <= DISTANCE).tolist():
            yield start + row, column, int(bits[row, column])
