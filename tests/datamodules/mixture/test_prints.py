"""Prints of pictures: what survives an encoding, what plain pictures have, and the search for those alike."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datamodules.mixture.prints import DISTANCE, Prints, alike
from tests.datamodules.mixture.pictures import drawn


def encoded(image, **options):
    content = io.BytesIO()
    image.save(content, **options)
    return Image.open(content)


def stripes():
    return Image.fromarray(np.tile(np.repeat(np.array([0, 255], np.uint8), 8), (64, 4)))


@pytest.mark.parametrize(
    "plain",
    [Image.new("RGB", (50, 50), "red"), Image.new("L", (1, 1), 7), Image.linear_gradient("L"), stripes()],
    ids=["red", "a pixel", "ramp", "stripes"],
)
def test_a_plain_picture_looks_like_nothing(plain):
    assert Prints()(plain).look is None
    assert Prints()(encoded(plain.convert("RGB"), format="JPEG", quality=75)).look is None


@pytest.mark.parametrize("number", range(4))
def test_a_copy_looks_alike_and_has_other_pixels(number):
    picture, prints = drawn(number), Prints()
    first = prints(picture)
    assert prints(encoded(picture, format="BMP")) == first
    half = picture.resize((picture.width // 2, picture.height // 2))
    for copy in (encoded(picture, format="JPEG", quality=75), half, encoded(half, format="WEBP", quality=60)):
        other = prints(copy)
        assert other.pixels != first.pixels
        assert list(alike([first.look], [other.look])) == [(0, 0, (first.look ^ other.look).bit_count())]


def test_other_pictures_do_not():
    looks = [Prints()(drawn(number)).look for number in range(20)]
    assert list(alike(looks, looks)) == [(number, number, 0) for number in range(20)]


LOOKS = st.lists(st.integers(0, 2**64 - 1), max_size=70)


@given(LOOKS, st.lists(st.tuples(st.integers(0, 69), st.sets(st.integers(0, 63), max_size=9)), max_size=20))
def test_the_search_finds_those_that_differ_in_few_bits(ours, flips):
    theirs = [ours[n % len(ours)] ^ sum(1 << bit for bit in bits) for n, bits in flips if ours]
    expected = [
        (row, column, bits)
        for row, first in enumerate(ours)
        for column, second in enumerate(theirs)
        if (bits := (first ^ second).bit_count()) <= DISTANCE
    ]
    assert list(alike(ours, theirs)) == expected


def test_a_file_is_opened_once(tmp_path):
    drawn(1).save(tmp_path / "a.png")
    prints = Prints()
    known = prints(tmp_path / "a.png")
    (tmp_path / "a.png").unlink()
    assert prints(tmp_path / "a.png") == known == prints(drawn(1))
