"""The streaming door: batches out of remote or piped shards, in webdataset's pipeline, with a local cache.

Shards are dealt to ranks and loader workers in the order of the manifest, always the same ones, so that each machine
caches only its own; what is shuffled per epoch is the order of a worker's shards and of the samples in a buffer. On
one rank an epoch is every sample once. On several each rank gives the same number of batches: a worker that has more
samples than its share stops early, one that has fewer starts over.

An epoch can be begun again behind any of its batches: with the same ranks, workers and batch size the rest is what it
would have been. What lies before is read once more, but from the cache, if there is one. With others the rest is dealt
anew, so that samples may come twice in that epoch, or not at all; the next epoch is whole again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.utils.data import IterableDataset
from webdataset.filters import shuffle
from webdataset.gopen import gopen
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import SimpleShardList
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.utils import (
    enforce_security,  # pyright: ignore[reportAttributeAccessIssue]  (its stub lacks it)
    pytorch_worker_info,
)

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest, ShardEntry
from fovea.artifacts.reading import check_entry
from fovea.artifacts.schema import META, TENSORS, decode_sample
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20


def is_remote(location: str) -> bool:
    """True for a URL or a pipe, false for a local folder."""
    return "://" in location or location.startswith("pipe:")


def open_location(location: str, name: str) -> BinaryIO:
    """The file ``name`` at ``location``: a folder, a URL, or a command ``pipe:... {name} ...``.

    As everywhere in webdataset, WDS_SECURE=1 in the environment forbids pipes.
    """
    if not is_remote(location):
        return (Path(location) / name).open("rb")
    if location.startswith("pipe:") and enforce_security:
        raise ArtifactError(f"WDS_SECURE=1 in the environment forbids commands ({location}); give a folder or URL")
    if location.startswith("pipe:") and "{name}" not in location:
        raise ArtifactError(f"'{location}' reads no particular file; write {{name}} where the name of a shard belongs")
    opened = gopen(location.replace("{name}", name) if "{name}" in location else f"{location.rstrip('/')}/{name}")
    return cast(BinaryIO, opened)


def read_manifest(location: str) -> Manifest:
    """The manifest at ``location``.

    Raises:
        ArtifactError: if it cannot be read there.
    """
    if not is_remote(location):
        return Manifest.read(Path(location))
    try:
        with open_location(location, MANIFEST) as stream:
            return Manifest.from_bytes(stream.read(), f"{location} {MANIFEST}")
    except OSError as error:
        raise ArtifactError(f"no finished artifacts at {location}: {MANIFEST} cannot be read ({error})") from error


class StreamedArtifacts(IterableDataset[TeacherBatch]):
    """Batches of samples from shards that are read from front to back; give it to a loader with ``batch_size=None``.

    Args:
        location: see :func:`open_location`.
        batch_size: samples per batch; a worker's last batch may be smaller.
        num_workers: loader workers that will read; capped, with a notice, to the shards that each rank has.
        shuffle_buffer: samples among which the next one is drawn; 0 reads in the order of the shards.
        seed: of shuffling, together with the epoch.
        cache: folder that keeps local copies of the shards; None reads them anew in every epoch.
        feature_layers: layers whose outputs are wanted.
        collate: makes a batch of samples.

    Attributes:
        num_workers: what to give to the loader.
    """

    def __init__(
        self,
        location: str,
        *,
        batch_size: int,
        num_workers: int = 0,
        shuffle_buffer: int = 256,
        seed: int = 0,
        cache: Path | None = None,
        feature_layers: Sequence[int] = (),
        collate: Callable[[Sequence[TeacherSample]], Any] = TeacherBatch.collate,
    ):
        """Reads the manifest.

        Raises:
            ArtifactError: if there is none, there are fewer shards than ranks, or the layers were not exported.
        """
        super().__init__()
        self.location, self.manifest = location, read_manifest(location)
        self.manifest.require_feature_layers(feature_layers, location)
        self.feature_layers, self._collate = tuple(feature_layers), collate
        self.batch_size, self.shuffle_buffer, self.seed, self.epoch = batch_size, shuffle_buffer, seed, 0
        self._begun: tuple[int, int] = (0, 0)
        # Sets with shards of the same names share a cache folder without meeting.
        self.cache = None if cache is None else cache / self.manifest.fingerprint.digest()
        _, world_size, _, _ = pytorch_worker_info()
        shards = len(self.manifest.shards)
        if not len(self.manifest):
            raise ArtifactError(f"the artifacts at {location} hold no sample; export again")
        if shards < world_size:
            raise ArtifactError(
                f"{world_size} ranks cannot share the {shards} shards at {location}; export with smaller shard_bytes, "
                "or read a local copy through the indexed door"
            )
        self.num_workers = min(num_workers, shards // world_size)
        if self.num_workers < num_workers:
            logger.warning(
                "%d shards on %d ranks leave work for %d of %d loader workers on each; using %d",
                shards, world_size, self.num_workers, num_workers, self.num_workers,
            )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Chooses the shuffling of the next pass."""
        self.epoch = epoch

    def begin_at(self, epoch: int, batches: int) -> None:
        """A pass over ``epoch`` begins behind its first ``batches`` batches of each rank; other epochs are whole."""
        self._begun = (epoch, batches)

    @property
    def first_batch(self) -> int:
        """Number of the batch that the next pass begins with."""
        epoch, batches = self._begun
        return batches if epoch == self.epoch else 0

    def __len__(self) -> int:
        """Batches per epoch of this rank."""
        return sum(self._batches_of(max(self.num_workers, 1)))

    def __iter__(self) -> Iterator[TeacherBatch]:
        rank, world_size, worker, workers = pytorch_worker_info()
        given, turn = self._given(self.first_batch, workers)
        # A loader takes batches from its workers in turn, from the first one on: that is the one whose turn it was.
        worker = (worker + turn) % workers
        share = self._share(rank, world_size, worker, workers)
        shuffler = random.Random(f"{self.seed}-{self.epoch}-{rank}-{worker}")
        samples = islice(self._forever(shuffler, (rank, world_size), (worker, workers)), share)
        skipped = min(given[worker] * self.batch_size, share)
        samples = islice(samples, skipped, None)
        while batch := list(islice(samples, self.batch_size)):
            yield self._collate(batch)

    def _given(self, batches: int, workers: int) -> tuple[list[int], int]:
        """How many of a pass's first ``batches`` batches each worker has given, and whose turn it is then."""
        left = self._batches_of(workers)
        given, turn = [0] * len(left), 0
        for _ in range(min(batches, sum(left))):
            while given[turn] == left[turn]:
                turn = (turn + 1) % len(left)
            given[turn] += 1
            turn = (turn + 1) % len(left)
        return given, turn

    def _batches_of(self, workers: int) -> list[int]:
        """Batches that each of ``workers`` workers of this rank gives in an epoch."""
        rank, world_size, _, _ = pytorch_worker_info()
        return [-(-self._share(rank, world_size, worker, workers) // self.batch_size) for worker in range(workers)]

    def _share(self, rank: int, world_size: int, worker: int, workers: int) -> int:
        """Samples that a worker gives in an epoch."""
        if world_size == 1:
            return sum(len(shard.samples) for shard in self.manifest.shards[worker::workers])
        per_rank = len(self.manifest) // world_size
        return per_rank // workers + (worker < per_rank % workers)

    def _forever(
        self, shuffler: random.Random, rank: tuple[int, int], worker: tuple[int, int]
    ) -> Iterator[TeacherSample]:
        """Samples of the shards dealt to a ``rank`` of so many and a ``worker`` of so many in it, over and over."""
        shards = {shard.name: shard for shard in self.manifest.shards}
        dealt = list(shards)[rank[0] :: rank[1]][worker[0] :: worker[1]]
        while True:
            stages: list[Any] = [SimpleShardList(dealt)]
            if self.shuffle_buffer:
                stages.append(shuffle(len(shards), initial=len(shards), rng=shuffler))
            stages.append(lambda urls: (s for url in urls for s in self._shard_samples(shards[url["url"]])))
            if self.shuffle_buffer:
                stages.append(shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=shuffler))
            yield from DataPipeline(*stages)

    def _shard_samples(self, shard: ShardEntry) -> Iterator[TeacherSample]:
        """All samples of a shard, checked against the manifest.

        Raises:
            ArtifactError: if the shard is cut, damaged or another one, with the numbers.
        """
        found, where = 0, f"{self.location} {shard.name}"
        try:
            with self._open(shard) as stream:
                for members in group_by_keys(_tar_members(stream, shard.name)):
                    entry = shard.samples[found] if found < len(shard.samples) else None
                    if entry is None:
                        raise ArtifactError(f"{where} has more samples than the {found} of the manifest")
                    if META not in members or TENSORS not in members:
                        lacking = f" (sample '{members['__key__']}' lacks {META} or {TENSORS})"
                        raise ArtifactError(_broken(where, found, shard, lacking))
                    sample = _decode(members, self.feature_layers)
                    check_entry(sample, entry, where)
                    found += 1
                    yield sample
        except ArtifactError:
            raise
        except Exception as error:  # whatever tar reader or transport make of a broken stream
            raise ArtifactError(_broken(where, found, shard, f" ({error})")) from error
        if found != len(shard.samples):
            raise ArtifactError(_broken(where, found, shard, ""))

    def _open(self, shard: ShardEntry) -> BinaryIO:
        if self.cache is None:
            return open_location(self.location, shard.name)
        path = self.cache / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            self._download(shard, path)
        return path.open("rb")

    def _download(self, shard: ShardEntry, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        digest, size = hashlib.sha256(), 0
        with open_location(self.location, shard.name) as stream, partial.open("wb") as file:
            while chunk := stream.read(_CHUNK):
                size += file.write(chunk)
                digest.update(chunk)
        if digest.hexdigest() != shard.sha256:
            partial.unlink()
            raise ArtifactError(
                f"{self.location} {shard.name} arrived with {size} bytes of {shard.bytes} or with other content "
                "(sha256 differs from the manifest); check the copy there"
            )
        partial.rename(path)


def _tar_members(stream: BinaryIO, name: str) -> Iterable[dict[str, Any]]:
    return tar_file_expander([{"url": name, "stream": stream}])


def _decode(members: dict[str, Any], feature_layers: Sequence[int]) -> TeacherSample:
    # bytearray: a tensor over bytes would claim to be writable.
    data = torch.frombuffer(bytearray(members[TENSORS]), dtype=torch.uint8)
    return decode_sample(members[META], data, feature_layers)[0]


def _broken(where: str, found: int, shard: ShardEntry, why: str) -> str:
    return f"{where} is cut, damaged or not ours: {found} of its {len(shard.samples)} samples could be read{why}"
