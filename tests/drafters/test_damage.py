"""Damaged drafters: flipped, cut, made up; never other weights or settings, and only errors of ours, with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fovea.drafters.base import Drafter
from fovea.drafters.checkpoint import CheckpointError, Teaching, load_drafter, save_drafter
from fovea.drafters.fovea import FoveaDrafter
from tests.artifacts.test_damage import JSON, places

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TEACHING = Teaching((1, 2), "abc", {"max_pixels": 4})


@pytest.fixture
def saved(tmp_path: Path, make_drafter) -> tuple[Path, FoveaDrafter]:
    drafter = make_drafter(num_blocks=1)
    save_drafter(tmp_path, drafter, TEACHING, origin={"commit": "abc"})
    return tmp_path, drafter


def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """``raw`` with some of its bits flipped, cut, or with bytes put in."""
    at = draw(st.integers(0, len(raw) - 1))
    match draw(st.sampled_from(["flipped", "cut", "longer"])):
        case "flipped":
            flips = draw(st.lists(st.tuples(st.just(at) | st.integers(0, len(raw) - 1), st.integers(0, 7)), min_size=1))
            found = bytearray(raw)
            for place, bit in flips:
                found[place] ^= 1 << bit
            return bytes(found)
        case "cut":
            return raw[:at]
        case _:
            return raw[:at] + draw(st.binary(min_size=1, max_size=40)) + raw[at:]


def read(folder: Path, drafter: FoveaDrafter) -> Drafter | str:
    """What lies in ``folder``, or what is said of it."""
    try:
        return load_drafter(folder, drafter.head, drafter.spec, teaching=TEACHING)
    except CheckpointError as error:
        return str(error)


def assert_same(found: Drafter, drafter: FoveaDrafter) -> None:
    assert found.config == drafter.config
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, drafter.state_dict()[name]), name


@QUIET
@given(data=st.data())
@pytest.mark.parametrize("file", [WEIGHTS, CONFIG])
def test_a_damaged_file(saved, file, data):
    folder, drafter = saved
    raw = (folder / file).read_bytes()
    try:
        (folder / file).write_bytes(damaged(data.draw, raw))
        found = read(folder, drafter)
        if isinstance(found, str):
            assert str(folder / file) in found
            assert "copy the drafter again" in found
        else:
            assert_same(found, drafter)
    finally:
        (folder / file).write_bytes(raw)


@QUIET
@given(data=st.data())
@pytest.mark.parametrize("checked", [True, False], ids=["this version", "an older one"])
def test_a_config_with_anything_in_any_place(saved, checked, data):
    """With its checksum nothing passes; one of an older version is read if its values are ones that can be."""
    folder, drafter = saved
    raw = (folder / CONFIG).read_bytes()
    record = json.loads(raw)
    if not checked:
        del record["crc"]
    *above, last = data.draw(st.sampled_from([place for place in places(record) if place != ("crc",)]))
    node = record
    for name in above:
        node = node[name]
    before, node[last] = node[last], data.draw(JSON.filter(lambda value: not isinstance(value, int) or value < 99))
    try:
        (folder / CONFIG).write_text(json.dumps(record))
        found = read(folder, drafter)
        if isinstance(found, str):
            assert str(folder) in found
        else:
            assert not checked or json.dumps(before) == json.dumps(node[last])
            for name, weight in found.state_dict().items():
                assert torch.equal(weight, drafter.state_dict()[name]), name
    finally:
        (folder / CONFIG).write_bytes(raw)


@QUIET
@given(raw=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 10**5))
def test_a_config_and_weights_of_anything(saved, raw):
    folder, drafter = saved
    for file in (CONFIG, WEIGHTS):
        kept = (folder / file).read_bytes()
        (folder / file).write_bytes(raw)
        said = read(folder, drafter)
        (folder / file).write_bytes(kept)
        assert isinstance(said, str)
        assert str(folder / file) in said
        assert "copy the drafter again" in said


def test_bits_that_are_read_as_another_type_are_noticed(saved):
    """The bytes are the same, and so are names and shapes."""
    folder, drafter = saved
    raw = (folder / WEIGHTS).read_bytes()
    assert raw.count(b'"dtype":"F32"') == len(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(CheckpointError, match=r"is damaged: the CRC-32 of its weights is \w+, and it says"):
        load_drafter(folder, drafter.head, drafter.spec)


def test_weights_with_the_checksum_of_an_older_version_are_read(saved):
    """It was over names and contents alone."""
    import zlib

    folder, drafter = saved
    weights, crc = load_file(folder / WEIGHTS), 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].numpy().tobytes(), zlib.crc32(name.encode(), crc))
    save_file(weights, folder / WEIGHTS, metadata={"crc": f"{crc:08x}"})
    assert_same(load_drafter(folder, drafter.head, drafter.spec), drafter)
    weights["norm.weight"][0] += 1
    save_file(weights, folder / WEIGHTS, metadata={"crc": f"{crc:08x}"})
    with pytest.raises(CheckpointError, match="CRC-32"):
        load_drafter(folder, drafter.head, drafter.spec)
