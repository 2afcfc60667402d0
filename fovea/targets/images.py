"""Opening pictures: one documented policy for everything that a data set may hold.

Whatever comes in leaves as an upright 8-bit RGB picture:

* the EXIF orientation is applied;
* 16-bit greys are scaled to 8 bit, not clipped; other integer or floating-point pixels are refused;
* transparency is laid over white;
* palettes, greys and CMYK are converted; of an animation the first frame is taken;
* a file that is cut, empty, missing, no picture or a folder raises :class:`BrokenImageError`, which names it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fovea.targets.conversation import ImageSource

_WHITE = (255, 255, 255, 255)


class BrokenImageError(ValueError):
    """A picture that cannot be read; the message names it and the remedy."""


def open_image(source: ImageSource, name: str = "a picture in memory") -> Image.Image:
    """The upright RGB picture behind ``source``; ``name`` stands for a picture in memory in messages.

    Raises:
        BrokenImageError: the picture cannot be decoded, has no pixels or holds numbers without a known range.
    """
    if isinstance(source, Image.Image):
        return _decode(source, name)
    path = Path(source)
    if not path.exists():
        raise BrokenImageError(f"image '{path}' does not exist; correct its path or the image root")
    if path.is_dir():
        raise BrokenImageError(f"image '{path}' is a folder; name a picture file")
    try:
        with Image.open(path) as image:
            return _decode(image, f"image '{path}'")
    except BrokenImageError:
        raise
    except Exception as error:  # decoders raise whatever a broken byte leads them to
        raise BrokenImageError(f"image '{path}' cannot be opened ({error}); replace the file or drop it") from error


def _decode(image: Image.Image, name: str) -> Image.Image:
    try:
        if getattr(image, "n_frames", 1) > 1:
            image.seek(0)
        if not image.width or not image.height:
            raise BrokenImageError(f"{name} has no pixels; replace it or drop it")
        upright = ImageOps.exif_transpose(image)
        return _to_rgb(upright, name)
    except BrokenImageError:
        raise
    except Exception as error:
        raise BrokenImageError(f"{name} cannot be decoded ({error}); replace it or drop it") from error


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_16_bit(image, name).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _scale_16_bit(image: Image.Image, name: str) -> Image.Image:
    """8-bit grey of a 16-bit one: v / 257, so that black and white stay what they are."""
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise BrokenImageError(
            f"{name} holds pixels from {pixels.min()} to {pixels.max()}, an unknown range; convert it to 8 bit"
        )
    return Image.fromarray(np.round(pixels / 257).astype(np.uint8))
