"""Only whole shards carry a shard's name, and a writer continues where another one ended."""

import json
import tarfile
import threading
from dataclasses import replace

import pytest

from fovea.artifacts.errors import ArtifactError, FingerprintMismatchError
from fovea.artifacts.manifest import Manifest
from fovea.artifacts.ranks import sole_writer
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import META, SampleMeta
from fovea.artifacts.writer import ArtifactWriter, finish_rank, whole_shards


def writer(folder, fingerprint, **settings):
    return ArtifactWriter(folder, fingerprint, **{"dtype": "bf16", "shard_bytes": 8_000, **settings})


def test_shards_close_before_they_grow_too_large(tmp_path, fingerprint, make_sample, assert_same):
    samples = [make_sample(f"k{i}") for i in range(9)]
    with writer(tmp_path, fingerprint) as out:
        for sample in samples:
            out.write(sample, SampleMeta())
    finish_rank(tmp_path, fingerprint, {}, 0, 1)
    shards = Manifest.read(tmp_path).shards
    assert len(shards) > 2
    assert all(shard.bytes <= 8_000 + 1024 for shard in shards)
    assert [s.key for shard in shards for s in shard.samples] == [s.key for s in samples]
    for found, sample in zip(open_artifacts(tmp_path), samples, strict=True):
        assert_same(found, sample)


def test_manifest_points_at_the_members(tmp_path, fingerprint, make_sample):
    with writer(tmp_path, fingerprint, shard_bytes=1_000_000) as out:
        for key in ("a.b", "x" * 300):  # the long name takes extended tar headers
            out.write(make_sample(key), SampleMeta())
    (shard,) = whole_shards(tmp_path, fingerprint)
    content = (tmp_path / shard.name).read_bytes()
    assert len(content) == shard.bytes
    with tarfile.open(tmp_path / shard.name) as archive:
        places = [(info.offset_data, info.size) for info in archive]
    assert places == [place for sample in shard.samples for place in (sample.meta, sample.data)]
    for sample in shard.samples:
        offset, size = sample.meta
        assert json.loads(content[offset : offset + size])["key"] == sample.key


def test_same_bytes_each_time(tmp_path, fingerprint, make_sample):
    for folder in ("a", "b"):
        with writer(tmp_path / folder, fingerprint) as out:
            out.write(make_sample("k"), SampleMeta())
    one, other = ((tmp_path / f / "shard-00-00000.tar").read_bytes() for f in "ab")
    assert one == other


class InterruptedFile:
    """Takes half of what it is given and is interrupted."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise KeyboardInterrupt


def write_and_be_interrupted(out, make_sample):
    with out:
        out.write(make_sample("a"), SampleMeta())
        out.write(make_sample("b"), SampleMeta())
        file, out._file = out._file, InterruptedFile(out._file)
        try:
            out.write(make_sample("c"), SampleMeta())
        finally:
            out._file = file


def test_interrupt_keeps_whole_samples_only(tmp_path, fingerprint, make_sample, assert_same):
    with pytest.raises(KeyboardInterrupt):
        write_and_be_interrupted(writer(tmp_path, fingerprint, shard_bytes=1_000_000), make_sample)
    again = writer(tmp_path, fingerprint)
    assert again.done == {"a", "b"}
    with again:
        again.write(make_sample("c"), SampleMeta())
    finish_rank(tmp_path, fingerprint, {}, 0, 1)
    artifacts = open_artifacts(tmp_path)
    artifacts.verify()
    for found, key in zip(artifacts, "abc", strict=True):
        assert_same(found, make_sample(key))


def test_what_a_killed_writer_left_is_dropped(tmp_path, fingerprint, make_sample):
    out = writer(tmp_path, fingerprint)
    out.write(make_sample("a"), SampleMeta())  # never closed
    assert not list(tmp_path.glob("shard-*"))
    (tmp_path / "shard-00-00000.json").write_text("{}")  # killed between the index and the renaming
    again = writer(tmp_path, fingerprint)
    assert again.done == set()
    assert not list(tmp_path.glob(".shard-*"))
    with pytest.raises(ArtifactError, match=r"manifest.json is missing"):
        open_artifacts(tmp_path)


def test_other_fingerprint_is_refused(tmp_path, fingerprint, make_sample):
    with writer(tmp_path, fingerprint) as out:
        out.write(make_sample("a"), SampleMeta())
    with pytest.raises(FingerprintMismatchError, match="mid_layers"):
        writer(tmp_path, replace(fingerprint, mid_layers=(1,)))


def test_doubled_key_is_refused(tmp_path, fingerprint, make_sample):
    with writer(tmp_path, fingerprint) as out:
        out.write(make_sample("a"), SampleMeta())
    with pytest.raises(ArtifactError, match="'a' occurs twice"), writer(tmp_path, fingerprint) as out:
        out.write(make_sample("a"), SampleMeta())


def test_the_last_rank_writes_the_manifest(tmp_path, fingerprint, make_sample):
    for rank, key in ((1, "b"), (0, "a")):
        with pytest.raises(ArtifactError, match=r"manifest.json is missing"):
            Manifest.read(tmp_path)
        with writer(tmp_path, fingerprint, rank=rank) as out:
            out.write(make_sample(key), SampleMeta())
        finish_rank(tmp_path, fingerprint, {f"skipped by {rank}": "why"}, rank, 2)
    manifest = Manifest.read(tmp_path)
    assert {s.key for s in manifest.samples()} == {"a", "b"}
    assert len(manifest.skipped) == 2


def test_second_writer_waits(tmp_path, caplog):
    entered = threading.Event()

    def second():
        with sole_writer(tmp_path):
            entered.set()

    with sole_writer(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()
    assert "waiting" in caplog.text


def test_no_pickle(tmp_path, fingerprint, make_sample):
    with writer(tmp_path, fingerprint) as out:
        out.write(make_sample("a"), SampleMeta())
    with tarfile.open(tmp_path / "shard-00-00000.tar") as archive:
        assert {name.partition(".")[2] for name in archive.getnames()} == {META, "safetensors"}
