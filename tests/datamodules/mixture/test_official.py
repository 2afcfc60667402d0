"""Official identifiers: what two data sets call by different names, and what they call alike by chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.mixture.official import official_ids
from fovea.targets.conversation import Conversation, StoredImage


def ids(name, **fields):
    return official_ids(Conversation("k", [], images=(StoredImage("t, record 1", bytes),), meta={"images": [name]}))[1:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vg/VG_100K/2316003.jpg", ["vg:2316003"]),
        ("vg/VG_100K_2/12.jpg", ["vg:12"]),
        ("gqa/images/2366353.jpg", ["vg:2366353"]),
        ("/somewhere/coco/train2017/000000033471.jpg", ["coco:33471"]),
        ("val2014/33471.jpg", ["coco:33471"]),
        ("https://example.org/coco/000000033471.jpg?size=1", ["coco:33471"]),
        ("textvqa/train_images/0a1b2c3d4e5f6a7b.jpg", ["openimages:0a1b2c3d4e5f6a7b"]),
        ("two_col_100022.png", ["name:two_col_100022"]),
        ("cc3m-image/1454426_2591111986", ["name:1454426_2591111986"]),
        ("vg/mine/of/mathvista/12.png", []),  # a folder of the user's further up
        ("images/12.jpg", []),
        ("train/00000012.jpg", []),
        ("en/question_0012.png", []),
        ("screenshot_of_a_page.png", []),
        ("data:image/png;base64,AAAA12345678", []),
        (None, []),
    ],
)
def test_pictures(name, expected):
    assert ids(name) == expected


@given(st.integers(1, 999_999), st.sampled_from(["train", "val", "test"]), st.sampled_from(["2014", "2015", "2017"]))
def test_the_names_of_one_picture_of_coco(number, split, year):
    names = [f"COCO_{split}{year}_{number:012d}.jpg", f"coco/{split}{year}/{number:012d}.jpg", f"{number:012d}.png"]
    assert [ids(name) for name in names] == [[f"coco:{number}"]] * 3


def test_samples():
    asked = Conversation("mme/x#2", [], source="mme", meta={"id": "x"})
    assert official_ids(asked) == ["mme/x"]
    assert official_ids(Conversation("m0", [], source="gqa")) == ["m0"]
    llava = Conversation("000000033471#7", [], source="coco", meta={"id": "000000033471", "images": ["a.jpg"]})
    assert official_ids(llava) == ["coco/000000033471", "coco:33471"]
