"""The indexed door: what was written comes back without a copy, and broken shards are refused with numbers."""

import pickle
import shutil

import pytest
import torch
from torch.utils.data import DataLoader

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.targets.teacher_batch import TeacherBatch

KEYS = [f"set/{i}.png" for i in range(10)]


@pytest.fixture
def folder(tmp_path, fingerprint, make_sample):
    """Ten samples in several shards."""
    path = tmp_path / "artifacts"
    with ArtifactWriter(path, fingerprint, dtype="bf16", shard_bytes=8_000) as out:
        for i, key in enumerate(KEYS):
            out.write(make_sample(key, tokens=12 + i), SampleMeta("s", ((1, 2),), (f"hash{i}",)))
    finish_rank(path, fingerprint, {}, 0, 1)
    return path


def test_samples_and_meta(folder, make_sample, assert_same):
    artifacts = open_artifacts(folder)
    assert len(artifacts.manifest.shards) > 2
    assert len(artifacts) == 10
    for i in (9, 0, 5, -1):
        assert_same(artifacts[i], make_sample(KEYS[i], tokens=12 + i % 10))
    assert artifacts.meta(3) == SampleMeta("s", ((1, 2),), ("hash3",))
    artifacts.verify()


def test_states_are_mapped_and_writing_to_them_is_private(folder):
    one, other = open_artifacts(folder), open_artifacts(folder)
    first, second = one[0], one[1]
    assert first.last.untyped_storage().data_ptr() == second.visual.untyped_storage().data_ptr()
    before = other[0].last.clone()
    first.last.zero_()
    assert torch.equal(open_artifacts(folder)[0].last, before)
    assert torch.equal(other[0].last, before)


def test_loader_workers_read_the_same(folder):
    def batches(workers):
        loader = DataLoader(open_artifacts(folder), 4, num_workers=workers, collate_fn=TeacherBatch.collate)
        return list(loader)

    for alone, parallel in zip(batches(0), batches(2), strict=True):
        assert alone.keys == parallel.keys
        assert torch.equal(alone.last, parallel.last)


def test_pickled_without_the_mapping(folder):
    artifacts = open_artifacts(folder)
    expected = artifacts[0].last
    raw = pickle.dumps(artifacts)
    assert len(raw) < 100_000
    assert torch.equal(pickle.loads(raw)[0].last, expected)


@pytest.mark.parametrize("keep", [0, 512, 1024, -512, -1024, -1])
def test_cut_shard(folder, keep):
    shard = Manifest.read(folder).shards[1]
    path = folder / shard.name
    path.write_bytes(path.read_bytes()[: keep if keep >= 0 else shard.bytes + keep])
    size = keep if keep >= 0 else shard.bytes + keep
    with pytest.raises(ArtifactError, match=rf"{shard.name} is cut.*{size} bytes, the manifest says {shard.bytes}"):
        open_artifacts(folder)


def test_longer_shard(folder):
    path = folder / Manifest.read(folder).shards[0].name
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(ArtifactError, match="is cut or not ours"):
        open_artifacts(folder)


def test_missing_and_foreign_shards(folder):
    shard = Manifest.read(folder).shards[0]
    shutil.copy(folder / shard.name, folder / "shard-07-00000.tar")
    with pytest.raises(ArtifactError, match=r"does not list: shard-07-00000.tar"):
        open_artifacts(folder)
    (folder / "shard-07-00000.tar").unlink()
    (folder / shard.name).unlink()
    with pytest.raises(ArtifactError, match=rf"{shard.name} is missing.*{len(shard.samples)} samples"):
        open_artifacts(folder)


def test_shard_of_equal_size_with_other_content(folder, tmp_path, fingerprint, make_sample):
    with ArtifactWriter(tmp_path / "other", fingerprint, dtype="bf16", shard_bytes=8_000) as out:
        for i in range(10):
            out.write(make_sample(f"oth/{i}.png", tokens=12 + i), SampleMeta("s", ((1, 2),), (f"hash{i}",)))
    name = Manifest.read(folder).shards[0].name
    shutil.copy(tmp_path / "other" / name, folder / name)
    artifacts = open_artifacts(folder)
    with pytest.raises(ArtifactError, match=rf"found sample 'oth/0.png' where the manifest has '{KEYS[0]}'"):
        artifacts[0]
    with pytest.raises(ArtifactError, match="sha256"):
        artifacts.verify()


def test_junk_of_the_right_size(folder):
    shard = Manifest.read(folder).shards[0]
    (folder / shard.name).write_bytes(b"\xff" * shard.bytes)
    with pytest.raises(ArtifactError, match="holds no sample"):
        open_artifacts(folder)[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_broken_manifest(folder, content):
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ArtifactError, match=rf"{MANIFEST}.*export again"):
        open_artifacts(folder)


def test_missing_manifest_says_what_is_there(folder, tmp_path):
    (folder / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match=r"left \d whole shards there, run it again"):
        open_artifacts(folder)
    with pytest.raises(ArtifactError, match="no finished artifacts in"):
        open_artifacts(tmp_path / "nowhere")


@pytest.mark.parametrize(("checksums", "seen"), [("always", True), ("once", False)])
def test_bytes_that_change_after_they_were_compared(folder, checksums, seen) -> None:
    """A state's number changes in a shard whose samples have been read; a process that reads it first sees that."""
    artifacts = open_artifacts(folder, checksums=checksums)
    entry, shard = artifacts.entries[0], artifacts.manifest.shards[0]
    before = artifacts[0].last.clone()
    place = (folder / shard.name).read_bytes().index(before.view(torch.uint8).numpy().tobytes())
    with (folder / shard.name).open("r+b") as file:
        file.seek(place)
        file.write(b"\x01\x02")
    with pytest.raises(ArtifactError, match=f"'{entry.key}' is damaged"):
        open_artifacts(folder, checksums=checksums)[0]
    if seen:
        with pytest.raises(ArtifactError, match=f"'{entry.key}' is damaged"):
            artifacts[0]
    else:
        assert not torch.equal(artifacts[0].last, before)
