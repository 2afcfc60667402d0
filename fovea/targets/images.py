"""Opening pictures: one documented policy for everything that a data set may hold.

Whatever comes in leaves as an upright 8-bit RGB picture:

* the EXIF orientation is applied;
* 16-bit greys are scaled to 8 bit, not clipped; wider integers within 0..255 are taken as they are, those within 16 bit
  are scaled, others and floating-point pixels are refused;
* transparency is laid over white, that of a 16-bit grey too;
* palettes, greys and CMYK are converted; of an animation the first frame is taken;
* a file that is cut, empty, missing, no picture, a video or a folder raises :class:`BrokenImageError`, which names it.

A picture may be named by its path, by a URL (http, https or file), be written out as a ``data:image/...;base64`` URI,
or be part of a larger file (:class:`~fovea.targets.conversation.StoredImage`).
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image, ImageOps

from fovea.targets.conversation import ImageSource, StoredImage

_WHITE = (255, 255, 255, 255)
_ADDRESS = re.compile(r"(https?(?=://)|file(?=:/)|data(?=:))", re.IGNORECASE)
#: Characters that no name of a file has.
_LONG = 255
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
    scheme = _scheme(source)
    if _is_video(text, scheme):
        raise BrokenImageError(f"{label} is a video, and video is not supported; use its frames")
    if scheme == "data":
        return _written_out(text, label)
    if scheme in ("http", "https"):
        try:
            return _fetched(text)
        except Exception as error:  # no network, no such host, no such page, too late
            raise BrokenImageError(f"{label} cannot be fetched ({error}); download it and name the file") from error
    try:
        path = _local(text) if scheme == "file" else Path(source)
        if path.is_dir():
            raise BrokenImageError(f"{label} is a folder; name a picture file")
        if not path.exists():
            raise BrokenImageError(f"{label} does not exist; correct its path or the image root")
        return path.read_bytes()
    except BrokenImageError:
        raise
    except (OSError, ValueError) as error:  # a name that no file can have is among them
        why = (isinstance(error, OSError) and error.strerror) or error
        remedy = "a picture written out begins with data:image/png;base64," if len(text) > _LONG else "replace the file"
        raise BrokenImageError(f"{label} cannot be read ({why}); {remedy} or drop it") from error


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
    return isinstance(source, str) and bool(_scheme(source))


def _scheme(source: Path | str) -> str:
    """http, https, file or data, in whatever case they are written; empty for a path."""
    found = _ADDRESS.match(source) if isinstance(source, str) else None
    return found[1].lower() if found else ""


def _is_video(text: str, scheme: str) -> bool:
    if scheme == "data":
        return text[len("data:") :][: len("video/")].lower() == "video/"
    # A part of a video is named behind a "#", by its seconds; of an address whatever follows is no name.
    name = re.split("[?#]", text, maxsplit=1)[0] if scheme else re.sub("#t=[^#]*$", "", text)
    return Path(name[-16:]).suffix.lower() in _VIDEOS


def _written_out(text: str, label: str) -> bytes:
    """The content of a data URI, which may be broken into lines."""
    head, _, content = text.partition(",")
    try:
        if not head.rstrip().lower().endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode("".join(content.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        raise BrokenImageError(f"{label} cannot be read ({error}); write data:image/png;base64,...") from error


def _local(url: str) -> Path:
    """The path that a file URL names."""
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise ValueError(f"it lies on the host '{parts.netloc}'")
    return Path(unquote(parts.path))


# An export opens a picture once per turn.
@lru_cache(maxsize=16)
def _fetched(url: str) -> bytes:
    request = Request(url, headers={"User-Agent": "fovea"})  # some servers answer nobody without a name
    with urlopen(request, timeout=_TIMEOUT) as answer:
        return answer.read()


def _label(source: StoredImage | Path | str) -> str:
    """How messages call it, in characters that any log can hold; a picture written out is not written out again."""
    text = str(source)
    shown = text if len(text) <= 200 else f"{text[:40]}..."
    return f"image '{shown.encode(errors='backslashreplace').decode()}'"


def _decode(image: Image.Image, name: str) -> Image.Image:
    try:
        if getattr(image, "n_frames", 1) > 1:
            image.seek(0)
        if not image.width or not image.height:
            raise BrokenImageError(f"{name} has no pixels; replace it or drop it")
        deep = image.mode.startswith("I;") or image.format == "PPM"  # a grey of more than 8 bit, whatever it holds
        return _to_rgb(ImageOps.exif_transpose(image), name, deep)
    except BrokenImageError:
        raise
    except Exception as error:
        raise BrokenImageError(f"{name} cannot be decoded ({error}); replace it or drop it") from error


def _to_rgb(image: Image.Image, name: str, deep: bool) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _integer_grey(image, name, deep).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _integer_grey(image: Image.Image, name: str, deep: bool) -> Image.Image:
    """8-bit grey of a 16-bit one: v / 257, so that black and white stay what they are.

    Wider integers say nothing of their range: those of a picture within 0..255 are taken for 8-bit values.
    """
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise BrokenImageError(
            f"{name} holds pixels from {pixels.min()} to {pixels.max()}, an unknown range; convert it to 8 bit"
        )
    grey = np.round(pixels / 257) if deep or pixels.max() > 255 else pixels
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey = np.where(pixels == clear, 255, grey)
    return Image.fromarray(grey.astype(np.uint8))
