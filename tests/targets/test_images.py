import base64
import io
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from fovea.targets.images import BrokenImageError, image_bytes, is_address, open_image


def saved(folder: Path, name: str, image: Image.Image, **options) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "webp"])
def test_orientation_is_applied(tmp_path: Path, suffix: str) -> None:
    image = Image.new("RGB", (24, 16))
    image.paste((255, 0, 0), (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise
    upright = open_image(saved(tmp_path, f"turned.{suffix}", image, exif=exif))
    assert upright.size == (16, 24)
    assert upright.getpixel((12, 3))[0] > 200
    assert upright.getpixel((3, 3))[0] < 50
    assert open_image(upright).size == (16, 24), "it is not turned twice"


def test_sixteen_bit_greys_are_scaled(tmp_path: Path) -> None:
    levels = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    image = open_image(saved(tmp_path, "deep.png", Image.fromarray(levels)))
    assert np.asarray(image)[0].tolist() == [[0] * 3, [1] * 3, [128] * 3, [255] * 3]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_sixteen_bit_files_of_both_byte_orders(tmp_path: Path, suffix: str, order: str) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    mode = "I;16" if order == "<u2" else "I;16B"
    image = Image.frombytes(mode, (8, 8), ramp.astype(order).tobytes())
    opened = np.asarray(open_image(saved(tmp_path, f"deep.{suffix}", image)))[..., 0]
    assert np.abs(opened.astype(float) - ramp / 257).max() <= 0.5


@pytest.mark.parametrize(
    ("values", "greys"),
    [([0, 100, 255], [0, 100, 255]), ([0, 257, 65535], [0, 1, 255]), ([0, 128, 256], [0, 0, 1])],
)
def test_wide_integers_are_taken_by_their_range(tmp_path: Path, values: list[int], greys: list[int]) -> None:
    """Nothing in a TIFF of 32 bit says that its pixels are only 8 deep."""
    image = Image.fromarray(np.array([values], dtype=np.int32))
    assert image.mode == "I"
    for opened in (open_image(image), open_image(saved(tmp_path, "wide.tiff", image))):
        assert np.asarray(opened)[0].tolist() == [[grey] * 3 for grey in greys]


@pytest.mark.parametrize("suffix", ["png", "pgm"])
def test_a_dark_sixteen_bit_file_stays_dark(tmp_path: Path, suffix: str) -> None:
    levels = np.array([[0, 100, 255]], dtype=np.uint16)
    opened = open_image(saved(tmp_path, f"dark.{suffix}", Image.fromarray(levels)))
    assert np.asarray(opened)[0].tolist() == [[0] * 3, [0] * 3, [1] * 3]


def test_a_transparent_sixteen_bit_grey_is_white(tmp_path: Path) -> None:
    levels = np.array([[0, 1000, 65535]], dtype=np.uint16)
    path = saved(tmp_path, "deep.png", Image.fromarray(levels), transparency=1000)
    assert np.asarray(open_image(path))[0].tolist() == [[0] * 3, [255] * 3, [255] * 3]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_laid_over_white(mode: str) -> None:
    hidden = Image.new("RGBA", (2, 1), (10, 10, 10, 255))
    hidden.putpixel((1, 0), (10, 10, 10, 0))
    image = open_image(hidden.convert(mode))
    assert np.asarray(image)[0].tolist() == [[10] * 3, [255] * 3]


def test_a_transparent_palette_entry_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putpixel((1, 0), 1)
    opened = open_image(saved(tmp_path, "palette.png", image, transparency=1))
    assert np.asarray(opened)[0].tolist() == [[200, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "RGB"])
def test_every_other_mode_becomes_rgb(mode: str) -> None:
    image = open_image(Image.new("RGB", (3, 2), (255, 255, 255)).convert(mode))
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert np.asarray(image).min() == 255


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = saved(tmp_path, "moving.gif", frames[0], save_all=True, append_images=frames[1:])
    assert open_image(path).getpixel((0, 0)) == (255, 0, 0)
    with Image.open(path) as moving:
        moving.seek(1)
        assert open_image(moving).getpixel((0, 0)) == (255, 0, 0)


KINDS = {
    "grey.png": lambda rgb: rgb.convert("L"),
    "bits.png": lambda rgb: rgb.convert("1"),
    "palette.png": lambda rgb: rgb.quantize(16),
    "palette.gif": lambda rgb: rgb.quantize(16),
    "print.jpg": lambda rgb: rgb.convert("CMYK"),
    "luma.jpg": lambda rgb: rgb.convert("YCbCr"),
    "plain.webp": lambda rgb: rgb,
    "plain.bmp": lambda rgb: rgb,
    "plain.tiff": lambda rgb: rgb,
    "plain.ppm": lambda rgb: rgb,
}


@pytest.mark.parametrize("name", KINDS)
def test_ordinary_files_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    rgb = Image.fromarray(pixels).resize((40, 48), Image.Resampling.BICUBIC)
    path = saved(tmp_path, name, KINDS[name](rgb))
    opened = open_image(path)
    assert (opened.mode, opened.size) == ("RGB", (40, 48))
    assert np.array_equal(np.asarray(opened), np.asarray(load_image(str(path))))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web site that shows the files in ``tmp_path``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_urls_and_data_uris_are_the_files_behind_them(tmp_path: Path, site: str) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    path = saved(tmp_path, "a.png", Image.fromarray(pixels))
    written = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    broken = "\r\n".join(written[start : start + 76] for start in range(0, len(written), 76))
    addresses = [f"{site}/a.png", f"{site}/a.png?size=full", f"{site}/a.png?of=clip.mp4", site.upper() + "/a.png"]
    addresses += [written, written.replace("data:image", "DATA:Image"), broken]
    addresses += [path.as_uri(), f"FILE://localhost{path}", f"file:{path}"]
    for source in (str(path), *addresses):
        assert np.array_equal(np.asarray(open_image(source)), pixels)
        assert image_bytes(source) == path.read_bytes()
        assert is_address(source) == (source in addresses)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{site}/b.png", r"/b.png' cannot be fetched \(HTTP Error 404.*download it and name the file"),
        ("http://127.0.0.1:9/b.png", "cannot be fetched"),
        ("data:image/png,abc", "cannot be read .*it is not base64"),
        ("data:image/png;base64,a%b", "cannot be read .*write data:image/png;base64"),
        ("data:image/png;base64,AAAA", r"AAAA' cannot be opened \(cannot identify image file its content\)"),
        ("clip.mp4", "is a video, and video is not supported; use its frames"),
        ("{site}/clip.MOV?x=1", "video is not supported; use its frames"),
        ("data:video/mp4;base64,AAAA", "video is not supported"),
        ("DATA:Video/mp4;base64,AAAA", "video is not supported"),
        ("x.mp4#t=1", r"image 'x.mp4#t=1' is a video"),
        ("{site}/x.mp4#t=1,2", "is a video"),
        ("file:///x.mp4", "is a video"),
        ("x.mp4#1.png", "does not exist"),
        ("file://elsewhere/x.png", r"cannot be read \(it lies on the host 'elsewhere'\)"),
        ("file:///no%20where.png", "does not exist"),
        (
            300 * "A",
            r"^image 'A{40}\.\.\.' cannot be read \(File name too long\); a picture written out begins with data:",
        ),
        ("a\ud83d.png", r"^image 'a\\ud83d.png' does not exist"),
        ("a\0.png", "image 'a\0.png' (does not exist|cannot be read)"),
        ("data:image/png;base64," + 2000 * "A" + "?", r"^image 'data:image/png;base64,A+\.\.\.' cannot"),
    ],
)
def test_addresses_without_a_picture_are_named(site: str, source: str, message: str) -> None:
    with pytest.raises(BrokenImageError, match=message):
        open_image(source.format(site=site))


def test_a_picture_in_memory_is_not_changed() -> None:
    image = Image.new("RGB", (4, 4), "red")
    open_image(image).putpixel((0, 0), (0, 0, 0))
    assert image.getpixel((0, 0)) == (255, 0, 0)


def test_broken_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "JPEG")
    contents = {
        "cut.jpg": stream.getvalue()[:900],
        "empty.png": b"",
        "page.png": b"<!doctype html><title>404</title>",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BrokenImageError, match=rf"{name}.*(replace|drop)"):
            open_image(tmp_path / name)
    with pytest.raises(BrokenImageError, match="is a folder"):
        open_image(tmp_path)
    with pytest.raises(BrokenImageError, match="does not exist; correct its path"):
        open_image(str(tmp_path / "missing.png"))


def test_pixels_of_an_unknown_range_are_refused() -> None:
    for image in (Image.new("F", (2, 2), 0.5), Image.new("I", (2, 2), 70000)):
        with pytest.raises(BrokenImageError, match="image 2 of conversation 'x' holds pixels"):
            open_image(image, "image 2 of conversation 'x'")
