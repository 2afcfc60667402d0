"""Opening pictures: one documented policy for everything that a data set may hold.

Whatever comes in leaves as an upright 8-bit RGB picture:

* the EXIF orientation is applied;
* 16-bit greys are scaled to 8 bit, not clipped; other integer or floating-point pixels are refused;
* transparency is laid over white;
* palettes, greys and CMYK are converted; of an animation the first frame is taken;
* a file that is cut, empty, missing, no picture, a video or a folder raises :class:`BrokenImageError`, which names it.

A picture may be named by its path, by a URL (http or https), be written out as a ``data:image/...;base64`` URI, or be
part of a larger file (:class:`~fovea.targets.conversation.StoredImage`).
"""

from __future__ import annotations

import base64
import binascii
import io
from functools import lru_cache
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image, ImageOps

from fovea.targets.conversation import ImageSource, StoredImage

_WHITE = (255, 255, 255, 255)
_VIDEOS = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"))
#: Seconds without an answer after which a URL counts as broken.
_TIMEOUT = 30


class BrokenImageError(ValueError):
    """A picture that cannot be read; the message names it and the remedy."""


def open_image(source: ImageSource, name: str = "a picture in memory") -> Image.Image:
    """The upright RGB picture behind ``source``; ``name`` stands for a picture in memory in messages.

    Raises:
        BrokenImageError: the picture cannot be decoded, has no pixels or holds numbers without a known range.
    """
    if isinstance(source, Image.Image):
        return _decode(source, name)
    label = _label(source)
    content = io.BytesIO(image_bytes(source))
    try:
        with Image.open(content) as image:
            return _decode(image, label)
    except BrokenImageError:
        raise
    except Exception as error:  # decoders raise whatever a broken byte leads them to
        why = str(error).replace(repr(content), "its content")
        raise BrokenImageError(f"{label} cannot be opened ({why}); replace it or drop it") from error


def image_bytes(source: StoredImage | Path | str) -> bytes:
    """The encoded picture behind a path, a URL or a data URI, or inside a larger file.

    Raises:
        BrokenImageError: there is none, or it is a video.
    """
    label, text = _label(source), str(source)
    if isinstance(source, StoredImage):
        try:
            return source.read()
        except Exception as error:  # whatever reads the file raises what it likes
            raise BrokenImageError(f"{label} cannot be read ({error}); mend its file or drop it") from error
    if text.startswith("data:video/") or Path(text.split("?")[0][-16:]).suffix.lower() in _VIDEOS:
        raise BrokenImageError(f"{label} is a video, and video is not supported; use its frames")
    if text.startswith("data:"):
        head, _, content = text.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("it is not base64")
            return base64.b64decode(content, validate=True)
        except (ValueError, binascii.Error) as error:
            raise BrokenImageError(f"{label} cannot be read ({error}); write data:image/png;base64,...") from error
    if is_address(source):
        try:
            return _fetched(text)
        except Exception as error:  # no network, no such host, no such page, too late
            raise BrokenImageError(f"{label} cannot be fetched ({error}); download it and name the file") from error
    path = Path(source)
    if not path.exists():
        raise BrokenImageError(f"{label} does not exist; correct its path or the image root")
    if path.is_dir():
        raise BrokenImageError(f"{label} is a folder; name a picture file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenImageError(f"{label} cannot be read ({error}); replace the file or drop it") from error


def encoded_picture(source: ImageSource, name: str = "a picture in memory") -> bytes:
    """Bytes that :func:`open_image` makes the same picture of: those of its file, or a PNG of a picture in memory.

    Raises:
        BrokenImageError: there are none.
    """
    if not isinstance(source, Image.Image):
        return image_bytes(source)
    content = io.BytesIO()
    _decode(source, name).save(content, "PNG")
    return content.getvalue()


def is_address(source: ImageSource) -> bool:
    """Whether ``source`` is a URL or a data URI and no path."""
    return isinstance(source, str) and source.startswith(("http://", "https://", "data:"))


# An export opens a picture once per turn.
@lru_cache(maxsize=16)
def _fetched(url: str) -> bytes:
    request = Request(url, headers={"User-Agent": "fovea"})  # some servers answer nobody without a name
    with urlopen(request, timeout=_TIMEOUT) as answer:
        return answer.read()


def _label(source: StoredImage | Path | str) -> str:
    """How messages call it; a picture written out is not written out again."""
    text = str(source)
    return f"image '{text}'" if len(text) <= 200 else f"image '{text[:40]}...'"


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
