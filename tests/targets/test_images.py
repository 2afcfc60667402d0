import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.targets.images import BrokenImageError, open_image


def saved(folder: Path, name: str, image: Image.Image, **options) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


def test_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (24, 16))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise
    upright = open_image(saved(tmp_path, "turned.png", image, exif=exif))
    assert upright.size == (16, 24)
    assert upright.getpixel((15, 0)) == (255, 0, 0)


def test_sixteen_bit_greys_are_scaled(tmp_path: Path) -> None:
    levels = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    image = open_image(saved(tmp_path, "deep.png", Image.fromarray(levels)))
    assert np.asarray(image)[0].tolist() == [[0] * 3, [1] * 3, [128] * 3, [255] * 3]


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
