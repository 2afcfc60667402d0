"""The streaming door gives the same samples, to any number of workers and ranks, and notices what is missing."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.streaming import StreamedArtifacts, deal
from fovea.artifacts.transport import Patience
from fovea.artifacts.writer import ArtifactWriter, finish_rank

KEYS = [f"set/{i}.png" for i in range(11)]


@pytest.fixture
def make_folder(tmp_path, fingerprint, make_sample):
    """Eleven samples in as many shards as their size asks for."""

    def make(shard_bytes=8_000):
        path = tmp_path / f"artifacts-{shard_bytes}"
        with ArtifactWriter(path, fingerprint, dtype="bf16", shard_bytes=shard_bytes) as out:
            for i, key in enumerate(KEYS):
                out.write(make_sample(key, tokens=12 + i), SampleMeta())
        finish_rank(path, fingerprint, {}, 0, 1)
        return path

    return make


def read_keys(data, workers=0):
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    batches = [batch.keys for batch in loader]
    assert len(batches) == len(data)
    return batches


@pytest.fixture
def as_rank(monkeypatch):
    def set_rank(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return set_rank


def test_both_doors_give_the_same_samples(make_folder, assert_same):
    folder = make_folder()
    stream = StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0)
    for batch, sample in zip(sorted(stream, key=lambda batch: batch.keys), open_artifacts(folder), strict=True):
        assert batch.keys == (sample.key,)
        for name in ("ids", "last", "visual"):
            assert (getattr(batch, name)[0] == getattr(sample, name)).all()
        assert (batch.mid == sample.mid).all()


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("buffer", [0, 4, 100])
def test_one_rank_reads_each_sample_once(make_folder, workers, buffer):
    stream = StreamedArtifacts(str(make_folder()), batch_size=2, num_workers=workers, shuffle_buffer=buffer)
    assert stream.num_workers == workers
    assert sorted(key for batch in read_keys(stream, workers) for key in batch) == sorted(KEYS)


def test_order_depends_on_seed_and_epoch_alone(make_folder):
    folder = str(make_folder())

    def order(seed, epoch):
        stream = StreamedArtifacts(folder, batch_size=11, shuffle_buffer=8, seed=seed)
        stream.set_epoch(epoch)
        return read_keys(stream)[0]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert orders == [order(0, 0), order(0, 1), order(1, 0)]
    assert len(set(orders)) == 3
    assert tuple(KEYS) not in orders


def test_one_shard_and_four_workers(make_folder, caplog):
    stream = StreamedArtifacts(str(make_folder(10**6)), batch_size=4, num_workers=4)
    assert stream.num_workers == 4
    assert "1 shards for 4 readers" in caplog.text
    assert sorted(key for batch in read_keys(stream, stream.num_workers) for key in batch) == sorted(KEYS)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_give_equally_many_batches(make_folder, as_rank, workers):
    folder, sizes, seen = str(make_folder(5_000)), [], Counter()
    for rank in range(2):
        as_rank(rank, 2)
        stream = StreamedArtifacts(folder, batch_size=2, num_workers=workers)
        batches = read_keys(stream, workers)
        sizes.append([len(batch) for batch in batches])
        seen.update(key for batch in batches for key in batch)
    assert sizes[0] == sizes[1]
    assert set(seen) == set(KEYS)
    assert sum(seen.values()) == 12  # of eleven, one came twice


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_begins_behind_any_batch(make_folder, workers):
    """Workers have unequal shares, so their turns are not all alike."""
    folder = make_folder()

    def stream(epoch=3):
        made = StreamedArtifacts(str(folder), batch_size=2, num_workers=workers, shuffle_buffer=4, seed=5)
        made.set_epoch(epoch)
        return made

    whole = read_keys(stream(), workers)
    for done in range(0, len(whole), 1 if workers == 0 else 2):
        begun = stream()
        begun.begin_at(3, done)
        rest = [batch.keys for batch in DataLoader(begun, batch_size=None, num_workers=workers)]
        assert rest == whole[done:]
        assert (begun.first_batch, len(begun)) == (done, len(whole))
    other = stream(epoch=4)
    other.begin_at(3, 2)
    assert read_keys(other, workers) == read_keys(stream(epoch=4), workers)


@pytest.mark.parametrize(("shard_bytes", "shards"), [(9_500, 5), (19_000, 3)])
@pytest.mark.parametrize("workers", [0, 4])
def test_ranks_with_unequal_shards_take_equally_many_steps(make_folder, as_rank, shard_bytes, shards, workers, caplog):
    folder, sizes = make_folder(shard_bytes), []
    assert len(Manifest.read(folder).shards) == shards
    for rank in range(2):
        as_rank(rank, 2)
        stream = StreamedArtifacts(str(folder), batch_size=2, num_workers=workers)
        assert stream.num_workers == workers
        for epoch in range(2):
            stream.set_epoch(epoch)
            sizes.append([len(batch) for batch in read_keys(stream, stream.num_workers)])
    assert sizes == [sizes[0]] * 4
    assert sum(sizes[0]) == 6
    assert (f"{shards} shards for 8 readers" in caplog.text) == bool(workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("samples", [8, 9, 23, 64])
def test_nothing_is_lost_and_little_comes_twice(samples, ranks, workers):
    shares = [[deal(samples, (rank, ranks), (worker, workers)) for worker in range(workers)] for rank in range(ranks)]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    counts = Counter(number for share in shares for part in share for number in part)
    assert sorted(counts) == list(range(samples))
    assert sum(counts.values()) - samples < ranks
    assert max(counts.values()) <= 2


def test_no_samples(make_folder):
    folder = make_folder()
    replace(Manifest.read(folder), shards=()).write(folder)
    for open_door in (open_artifacts, lambda path: StreamedArtifacts(str(path), batch_size=1)):
        for shard in folder.glob("*.tar"):
            shard.unlink()
        with pytest.raises(ArtifactError, match=r"hold no sample; export again"):
            open_door(folder)


@pytest.mark.parametrize("workers", [0, 2])
def test_more_ranks_than_shards(make_folder, as_rank, workers):
    folder, seen = make_folder(10**6), Counter()
    for rank in range(3):
        as_rank(rank, 3)
        stream = StreamedArtifacts(str(folder), batch_size=2, num_workers=workers)
        batches = read_keys(stream, workers)
        assert len(batches) == 2
        seen.update(key for batch in batches for key in batch)
    assert set(seen) == set(KEYS)
    assert sum(seen.values()) == 12
    as_rank(0, 12)
    with pytest.raises(ArtifactError, match="12 ranks cannot share the 11 samples"):
        StreamedArtifacts(str(folder), batch_size=1)


def cuts(folder):
    """Lengths at which the second shard is cut: 512-byte borders, member borders, inside of headers and payloads."""
    shard = Manifest.read(folder).shards[1]
    second = shard.samples[1].meta[0] - 512
    return shard, [0, 512, 700, second, second + 512, second + 1500, shard.bytes - 1024 - 512]


@pytest.mark.parametrize("number", range(7))
def test_cut_shard(make_folder, number):
    folder = make_folder()
    shard, lengths = cuts(folder)
    path = folder / shard.name
    path.write_bytes(path.read_bytes()[: lengths[number]])
    whole = sum(sample.data[0] + sample.data[1] <= lengths[number] for sample in shard.samples)
    stream = StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0)
    with pytest.raises(
        ArtifactError, match=rf"{shard.name} is cut.* (\d+) of its {len(shard.samples)} samples"
    ) as error:
        list(stream)
    # The reader gives a sample only when it has seen the next one begin.
    assert int(str(error.value).partition(" of its")[0].split()[-1]) in (whole, whole - 1)


def test_other_content_and_longer_shards(make_folder):
    folder = make_folder()
    first, second = Manifest.read(folder).shards[:2]
    (folder / second.name).write_bytes((folder / first.name).read_bytes())
    with pytest.raises(ArtifactError, match="where the manifest has"):
        list(StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0))
    (folder / second.name).write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(ArtifactError, match="0 of its"):
        list(StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0))


def test_pipe_and_cache(make_folder, tmp_path):
    folder, cache = make_folder(), tmp_path / "cache"
    location = f"pipe:cat {folder}/{{name}}"
    plain = read_keys(StreamedArtifacts(location, batch_size=2, shuffle_buffer=0))
    stream = StreamedArtifacts(location, batch_size=2, shuffle_buffer=0, cache=cache)
    assert read_keys(stream) == plain
    assert sorted(key for batch in plain for key in batch) == sorted(KEYS)
    for shard in stream.manifest.shards:
        (folder / shard.name).unlink()
    assert read_keys(stream) == plain  # out of the cache


def test_cache_refuses_a_cut_download(make_folder, tmp_path):
    folder = make_folder()
    shard = Manifest.read(folder).shards[0]
    (folder / shard.name).write_bytes((folder / shard.name).read_bytes()[:-512])
    patience = Patience(retries=1, pause=0.01)
    stream = StreamedArtifacts(f"pipe:cat {folder}/{{name}}", batch_size=2, cache=tmp_path / "cache", patience=patience)
    with pytest.raises(ArtifactError, match=rf"in 2 attempts from pipe:.*{shard.bytes - 512} bytes of {shard.bytes}"):
        list(stream)
    assert not list((tmp_path / "cache").rglob(shard.name))


def test_failing_pipe(make_folder):
    folder = make_folder()
    with pytest.raises(ArtifactError, match=f"{MANIFEST} cannot be read"):
        StreamedArtifacts(f"pipe:cat {folder}/nowhere/{{name}}", batch_size=2)
    with pytest.raises(ArtifactError, match=r"write \{name\}"):
        StreamedArtifacts(f"pipe:cat {folder}/x", batch_size=2)


def test_secure_mode_refuses_pipes_and_still_reads_local_shards(make_folder):
    folder = make_folder()
    code = (
        "import sys\nfrom fovea.artifacts.streaming import StreamedArtifacts as S\n"
        "print(len(list(S(sys.argv[1], batch_size=1))))\nS('pipe:cat ' + sys.argv[1] + '/{name}', batch_size=1)"
    )
    command, environment = [sys.executable, "-c", code, str(folder)], {"WDS_SECURE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "11"
    assert "WDS_SECURE=1 in the environment forbids commands" in done.stderr
