"""Damaged artifacts: cut, flipped or made up, through both doors; never a wrong sample, and only errors of our own."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea.artifacts.check import damaged_shards, main
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import export
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.manifest import MANIFEST, Manifest, ShardEntry, checked, content_hash, write_checked
from fovea.artifacts.reading import IndexedArtifacts, open_artifacts
from fovea.artifacts.schema import SampleMeta, decode_sample
from fovea.artifacts.streaming import StreamedArtifacts
from fovea.artifacts.transport import Patience
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.targets.teacher_batch import TeacherSample
from tests.artifacts.conftest import sample_of

KEYS = ["set/0.png", "set/1.png", "x" * 120]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three samples in one shard."""
    path = tmp_path_factory.mktemp("damage") / "artifacts"
    fingerprint = Fingerprint("abc", {"max_pixels": 4}, "d", (1, 2), "bf16", "dataset")
    with ArtifactWriter(path, fingerprint, dtype="bf16", shard_bytes=10**6) as out:
        for number, key in enumerate(KEYS):
            out.write(sample_of(key, tokens=8 + number), SampleMeta("s", ((1, 2),), (f"hash{number}",)))
    finish_rank(path, fingerprint, {}, 0, 1)
    return path


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, TeacherSample]:
    return {sample.key: sample for sample in open_artifacts(folder)}


def indexed(folder: Path) -> Iterator[TeacherSample]:
    yield from open_artifacts(folder)


def streamed(folder: Path) -> Iterator[TeacherSample]:
    data = StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0)
    for shard in data.manifest.shards:
        yield from data._shard_samples(shard, [1] * len(shard.samples))


def assert_known(sample: TeacherSample, expected: dict[str, TeacherSample]) -> None:
    right = expected[sample.key]
    for name in ("ids", "positions", "answer_mask", "is_visual", "last", "mid", "visual", "importance"):
        assert torch.equal(getattr(sample, name), getattr(right, name)), f"a wrong sample: {sample.key}, {name}"


def read(door, folder: Path, expected: dict[str, TeacherSample]) -> str | None:
    """What ``door`` says of ``folder``; None if it gives all samples. Those before an error must be right too."""
    keys = []
    try:
        for sample in door(folder):
            assert_known(sample, expected)
            keys.append(sample.key)
    except ArtifactError as error:
        return str(error)
    assert keys == list(expected)
    return None


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_shard_cut_anywhere(copy, expected):
    """At every border of 512 bytes, beside each of them, and inside of payloads."""
    shard = Manifest.read(copy).shards[0]
    path = copy / shard.name
    whole = path.read_bytes()
    inside = [entry.data[0] + entry.data[1] // 2 for entry in shard.samples]
    borders = range(0, shard.bytes, 512)
    for length in sorted({*borders, *inside, *(border + 1 for border in borders), *(b - 1 for b in borders if b)}):
        path.write_bytes(whole[:length])
        first = read(indexed, copy, expected)
        assert first is not None, length
        assert shard.name in first
        assert f"{length} bytes, the manifest says {shard.bytes} with {len(KEYS)} samples" in first
        second = read(streamed, copy, expected)
        if second is None:  # all members are there, and only the end of the archive is not
            assert length >= shard.bytes - 1024
        else:
            assert shard.name in second
            assert f"of its {len(KEYS)} samples could be read" in second


@pytest.mark.parametrize("door", [indexed, streamed])
def test_every_flipped_bit_of_a_member_is_noticed(copy, expected, door):
    shard = Manifest.read(copy).shards[0]
    path, draw = copy / shard.name, random.Random(0)
    whole = path.read_bytes()
    for entry in shard.samples:
        for offset, size in (entry.meta, entry.data):
            for place in (0, size - 1, *(draw.randrange(size) for _ in range(12))):
                damaged = bytearray(whole)
                damaged[offset + place] ^= 1 << draw.randrange(8)
                path.write_bytes(damaged)
                assert read(door, copy, expected) is not None, (entry.key, place)
                assert list(damaged_shards(copy)) == [shard.name]


def test_a_flipped_payload_is_named_with_both_checksums(copy, expected):
    shard = Manifest.read(copy).shards[0]
    offset, size = shard.samples[1].data
    damaged = bytearray((copy / shard.name).read_bytes())
    damaged[offset + size // 2] ^= 4  # among the states, where any bits are a number
    (copy / shard.name).write_bytes(damaged)
    for door in (indexed, streamed):
        assert f"'{KEYS[1]}' is damaged: its XXH3-64 is" in read(door, copy, expected)


@pytest.mark.parametrize("door", [indexed, streamed])
def test_flipped_bits_anywhere_in_a_shard(copy, expected, door):
    """Headers and padding too: what changes nothing may pass."""
    shard = Manifest.read(copy).shards[0]
    path, draw = copy / shard.name, random.Random(1)
    whole = path.read_bytes()
    for _ in range(80):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        read(door, copy, expected)


def test_every_flipped_bit_of_the_manifest_is_noticed_or_means_nothing(copy, expected):
    path = copy / MANIFEST
    whole, draw = path.read_bytes(), random.Random(2)
    same = Manifest.read(copy)
    passed = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            found = Manifest.read(copy)
        except ArtifactError:
            continue
        passed += 1
        # Only the name of the checksum itself can be another.
        assert found == same
    assert passed < 10


def test_a_manifest_cannot_name_files_elsewhere_nor_commands(copy, expected):
    """The name of a shard becomes a part of paths, and of commands that fetch it."""
    for name in ("../artifacts/shard-00-00000.tar", "/etc/passwd", "x; touch owned", "shard-0-0.tar; touch owned"):
        values = json.loads((copy / MANIFEST).read_text())
        values["shards"][0]["name"] = name
        values.pop("crc", None)
        (copy / MANIFEST).write_text(json.dumps(values))
        for door in (indexed, streamed):
            assert "no entry of a shard" in read(door, copy, expected)
        with pytest.raises(ArtifactError, match="no entry of a shard"):
            StreamedArtifacts(f"pipe:cat {copy}/{{name}}", batch_size=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def places(values, path=()):
    """Paths to all values below a JSON value."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@QUIET
@given(data=st.data())
def test_a_manifest_with_anything_in_any_place(folder, expected, data):
    values = json.loads((folder / MANIFEST).read_text())
    del values["crc"]
    *above, last = data.draw(st.sampled_from(list(places(values))))
    node = values
    for key in above:
        node = node[key]
    node[last] = data.draw(JSON)
    try:
        manifest = Manifest.from_bytes(json.dumps(values).encode(), "here")
    except ArtifactError:
        return
    artifacts = IndexedArtifacts(folder, manifest)
    for index in range(len(artifacts)):
        try:
            sample = artifacts[index]
        except ArtifactError:
            continue
        except (OSError, RuntimeError):  # a shard of another size: open_artifacts looks at that first
            assert manifest.shards[0].bytes != Manifest.read(folder).shards[0].bytes
            continue
        assert_known(sample, expected)


def rewritten(path: Path, where: tuple, value: object) -> None:
    """Puts ``value`` at ``where`` into a JSON file, with a checksum that is right."""
    values = checked(path.read_bytes())
    node = values
    for name in where[:-1]:
        node = node[name]
    node[where[-1]] = value
    write_checked(path, values)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("fingerprint",), None, "no fingerprint"),
        (("fingerprint", "feature_layers"), [[1]], "layers and caps must be whole numbers"),
        (("fingerprint", "weights"), 5, "hashes, names and versions must be texts"),
        (("fingerprint", "versions"), {"torch": 2}, "hashes, names and versions must be texts"),
        (("skipped",), {"a": 5}, "a reason in words by key"),
        (("skipped",), [["a", "b"]], "a reason in words by key"),
        (("shards", 0, "samples", 1, "key"), KEYS[0], "has the sample 'set/0.png' twice"),
        (("shards", 0, "samples", 0, "xxh3"), 5, "no entry of a sample"),
    ],
)
def test_a_manifest_with_a_wrong_element_is_refused(copy, where, value, said):
    rewritten(copy / MANIFEST, where, value)
    with pytest.raises(ArtifactError, match=rf"manifest\.json is damaged .*{said}"):
        open_artifacts(copy)


def test_a_manifest_that_lists_a_shard_or_a_sample_twice_is_refused(copy):
    shard = checked((copy / MANIFEST).read_bytes())["shards"][0]
    rewritten(copy / MANIFEST, ("shards",), [shard, shard])
    with pytest.raises(ArtifactError, match=r"it lists shard-00-00000\.tar twice"):
        open_artifacts(copy)
    rewritten(copy / MANIFEST, ("shards",), [shard, {**shard, "name": "shard-00-00001.tar"}])
    with pytest.raises(ArtifactError, match=r"it lists the sample 'set/0\.png' twice"):
        open_artifacts(copy)


@QUIET
@given(data=st.data())
def test_an_index_with_anything_in_any_place(folder, tmp_path, data):
    """What is read of it is an entry that can be used, or an error of ours."""
    path = tmp_path / "shard-00-00000.json"
    values = checked((folder / path.name).read_bytes())
    where = data.draw(st.sampled_from(list(places(values))))
    write_checked(path, values)
    rewritten(path, where, data.draw(JSON))
    try:
        fingerprint, entry = ShardEntry.read(path)
        fingerprint.require(Fingerprint.from_json(values["fingerprint"]), "there")
        Manifest(fingerprint, (entry,)).summary()
    except ArtifactError:
        return


@QUIET
@given(raw=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 10**5))
def test_an_index_a_manifest_and_a_rank_record_of_anything(tmp_path, raw):
    path = tmp_path / "shard-00-00000.json"
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match=path.name):
        ShardEntry.read(path)
    with pytest.raises(ArtifactError, match="here"):
        Manifest.from_bytes(raw, "here")
    folder = tmp_path / "ranks"
    folder.mkdir(exist_ok=True)
    record, fingerprint = folder / "rank-01-of-02.json", Fingerprint("abc", {}, "d", (1,), "bf16", "dataset")
    record.write_bytes(raw)
    with pytest.raises(ArtifactError, match=rf"{record.name} is damaged .*; delete it"):
        finish_rank(folder, fingerprint, {}, 0, 2)


@QUIET
@given(raw=st.binary(min_size=1, max_size=2000), data=st.data())
def test_a_shard_of_any_bytes(folder, expected, tmp_path, raw, data):
    """Of the right size, and some of them a shard up to where they are not."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = copy / Manifest.read(copy).shards[0].name
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole) - len(raw)))
    path.write_bytes(whole[:start] + raw + whole[start + len(raw) :])
    for door in (indexed, streamed):
        read(door, copy, expected)


@QUIET
@given(raw=st.binary(max_size=400))
def test_a_manifest_of_any_bytes(raw):
    with pytest.raises(ArtifactError, match="here"):
        Manifest.from_bytes(raw, "here")


@QUIET
@given(data=st.data())
def test_a_sample_of_any_bytes(folder, data):
    """Some of them begin as one does."""
    shard = Manifest.read(folder).shards[0]
    whole, entry = (folder / shard.name).read_bytes(), shard.samples[0]
    meta, tensors = (whole[offset : offset + size] for offset, size in (entry.meta, entry.data))
    if data.draw(st.booleans()):
        meta = data.draw(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
    if data.draw(st.booleans()):
        header = data.draw(st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()))
        length = data.draw(st.sampled_from([len(header), 0, 2**40, 2**64 - 1]))
        tensors = length.to_bytes(8, "little") + header + tensors[: data.draw(st.integers(0, 400))]
    view = torch.frombuffer(bytearray(tensors) or bytearray(1), dtype=torch.uint8)[: len(tensors)]
    try:
        sample, _ = decode_sample(meta, view)
    except ArtifactError:
        return
    assert sample.last.shape[0] == sample.ids.shape[0]


class TestCheck:
    def test_sound_artifacts(self, copy, capsys):
        main([str(copy)])
        assert "every shard" in capsys.readouterr().out

    def test_damage_is_named_and_ends_with_1(self, copy, capsys):
        shard = Manifest.read(copy).shards[0]
        (copy / shard.name).write_bytes((copy / shard.name).read_bytes()[:-512])
        with pytest.raises(SystemExit, match="1 damaged; --drop"):
            main([str(copy)])
        assert shard.name in capsys.readouterr().out

    def test_no_artifacts(self, tmp_path):
        with pytest.raises(SystemExit, match="there are no artifacts in"):
            main([str(tmp_path)])

    def test_what_is_dropped_is_exported_again_and_nothing_else(
        self, tmp_path, conversations, config, fingerprint, fake_target, assert_same
    ):
        folder = tmp_path / "artifacts"
        export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        before = {sample.key: sample for sample in open_artifacts(folder)}
        first, second = Manifest.read(folder).shards[:2]
        damaged = bytearray((folder / first.name).read_bytes())
        damaged[700] ^= 1
        (folder / first.name).write_bytes(damaged)
        (folder / second.name).unlink()
        main([str(folder), "--drop"])
        target = fake_target()
        export(target, conversations, folder, config, fingerprint, progress=False)
        assert sum(target.batches) == len(first.samples) + len(second.samples)
        after = open_artifacts(folder)
        after.verify()
        assert sorted(sample.key for sample in after) == sorted(before)
        for sample in after:
            assert_same(sample, before[sample.key])

    def test_a_cut_index_is_refused_by_the_export_and_dropped(
        self, tmp_path, conversations, config, fingerprint, fake_target
    ):
        folder = tmp_path / "artifacts"
        export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        (folder / MANIFEST).unlink()
        index = sorted(folder.glob("shard-*.json"))[0]
        index.write_bytes(index.read_bytes()[:100])
        with pytest.raises(ArtifactError, match=rf"{index.name} is damaged .*artifacts.check .* --drop"):
            export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        main([str(folder), "--drop"])
        export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        assert len(open_artifacts(folder)) == len(conversations)

    @pytest.mark.parametrize("name", ["key", "xxh3"])
    def test_one_character_of_an_index_is_refused_by_the_export_and_found(
        self, tmp_path, conversations, config, fingerprint, fake_target, name
    ):
        """Else a sample would be stored twice, or refused for good by those who read it."""
        folder = tmp_path / "artifacts"
        export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        (folder / MANIFEST).unlink()
        index = sorted(folder.glob("shard-*.json"))[0]
        place = index.read_bytes().index(f'"{name}":"'.encode()) + len(name) + 4
        damaged = bytearray(index.read_bytes())
        damaged[place] ^= 1
        index.write_bytes(damaged)
        with pytest.raises(
            ArtifactError, match=rf"{index.name} is damaged \(its CRC-32 is .*artifacts.check .* --drop"
        ):
            export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        main([str(folder), "--drop"])
        export(fake_target(), conversations, folder, config, fingerprint, progress=False)
        assert sorted(sample.key for sample in open_artifacts(folder)) == sorted(c.key for c in conversations)

    @pytest.mark.parametrize(("name", "value"), [("key", "other"), ("crc", 7), ("tokens", 99)])
    def test_an_index_of_an_older_version_is_compared_with_the_samples(self, copy, name, value):
        """It has no checksum of its own."""
        shard = Manifest.read(copy).shards[0]
        (copy / MANIFEST).unlink()
        index = shard.index(copy)
        values = checked(index.read_bytes())
        for sample in values["shard"]["samples"]:
            del sample["xxh3"]
        index.write_text(json.dumps(values))
        assert damaged_shards(copy) == {}
        values["shard"]["samples"][1][name] = value
        index.write_text(json.dumps(values))
        assert list(damaged_shards(copy)) == [shard.name]

    def test_of_a_sample_in_two_shards_one_is_dropped(self, copy):
        first = Manifest.read(copy).shards[0]
        (copy / MANIFEST).unlink()
        second = replace(first, name="shard-01-00000.tar")
        shutil.copy(copy / first.name, copy / second.name)
        second.write(copy, Fingerprint("abc", {"max_pixels": 4}, "d", (1, 2), "bf16", "dataset"))
        found = damaged_shards(copy)
        assert list(found) == [second.name]
        assert f"sample 'set/0.png' is in {copy / second.name} and in {first.name}" in found[second.name]
        main([str(copy), "--drop"])
        assert damaged_shards(copy) == {}


def test_artifacts_with_a_crc_stay_readable(copy, expected):
    """As older versions wrote them; damage is found by it."""
    values = checked((copy / MANIFEST).read_bytes())
    content = (copy / values["shards"][0]["name"]).read_bytes()
    for sample in values["shards"][0]["samples"]:
        del sample["xxh3"]
        meta, data = (content[at : at + size] for at, size in (sample["meta"], sample["data"]))
        sample["crc"] = zlib.crc32(meta + data)
    write_checked(copy / MANIFEST, values)
    for door in (indexed, streamed):
        assert read(door, copy, expected) is None
    values["shards"][0]["samples"][0]["crc"] ^= 1
    write_checked(copy / MANIFEST, values)
    for door in (indexed, streamed):
        assert "'set/0.png' is damaged: its CRC-32 is" in read(door, copy, expected)


def test_the_hash_of_a_sample_is_xxh3_64():
    """The value of the reference implementation for no bytes, and both members in their order."""
    assert content_hash(b"", b"") == "2d06800538d394c2"
    assert content_hash(b"ab", b"c") == content_hash(b"a", b"bc") != content_hash(b"c", b"ab")


def test_a_reader_that_is_slow_and_one_that_dies(folder, expected, tmp_path):
    """Bytes that come in drops are all there; a stream that ends early is an error that names shard and samples."""
    slow = "pipe:sh -c 'head -c 3000 {0}/{1}; sleep 0.2; tail -c +3001 {0}/{1}'".format(folder, "{name}")
    assert [key for batch in StreamedArtifacts(slow, batch_size=1, shuffle_buffer=0) for key in batch.keys] == KEYS
    shard = Manifest.read(folder).shards[0].name
    for length in (0, 512, 2000, 4000):
        script = tmp_path / "dying.sh"
        script.write_text(f"case $1 in *.tar) head -c {length} $1; kill -9 $$;; *) cat $1;; esac")
        once = {"shuffle_buffer": 0, "patience": Patience(retries=0)}
        dying = StreamedArtifacts(f"pipe:sh {script} {folder}/{{name}}", batch_size=1, **once)
        with pytest.raises(ArtifactError, match=rf"{shard} is cut.* \d of its {len(KEYS)} samples could be read"):
            list(dying)
