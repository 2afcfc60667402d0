"""Every key that goes in comes out, and through webdataset too."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander
from webdataset.writer import TarWriter

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.keys import escape, unescape

AWKWARD = ["v1.5/x", "COCO_val.0001", "A.JPG", "__meta__", "50%2E", "a b\n", "é", "日本", "http://h/a?b=1", ".", ".."]


@given(st.text(min_size=1))
@example("\ud800")
def test_round_trip(key):
    assert unescape(escape(key)) == key


@given(st.text(min_size=1))
def test_webdataset_finds_the_whole_name(key):
    assert base_plus_ext(f"{escape(key)}.meta.json") == (escape(key), "meta.json")


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@example(["a%2E", "a."])
@example(["v1.5", "v1.6"])
def test_injective(keys):
    assert escape(keys[0]) != escape(keys[1])


def test_tar_gives_every_key_back():
    keys = [*AWKWARD, "x" * 400, "日" * 100]
    buffer = io.BytesIO()
    writer = TarWriter(buffer, encoder=False)
    for key in keys:
        writer.write({"__key__": escape(key), "meta.json": b"{}", "safetensors": b""})
    writer.close()
    buffer.seek(0)
    samples = group_by_keys(tar_file_expander([{"url": "", "stream": buffer}]))
    assert [unescape(sample["__key__"]) for sample in samples] == keys


def test_empty_key_is_refused():
    with pytest.raises(ArtifactError, match="empty key"):
        escape("")
