"""The streaming door: batches out of remote or piped shards that are read from front to back, with a local cache.

An epoch takes every sample once. So that all ranks take equally many steps, up to ranks - 1 samples come twice in it:
of S samples on R ranks each rank takes ceil(S / R), those that hold fewer their first one again. Nothing is lost.

Samples are dealt in one run of neighbours per rank, and within it one per loader worker, always the same ones, so that
each machine reads and caches only what it needs. Where a run ends within a shard, both neighbours read that shard; so
there may be more ranks and workers than shards. What is shuffled per epoch is the order of a worker's shards and of the
samples in a buffer; that of the shards in which samples are dealt is drawn once per set.

An epoch can be begun again behind any of its batches: with the same ranks, workers and batch size the rest is what it
would have been. What lies before is read once more, but from the cache, if there is one. With others the rest is dealt
anew, so that samples may come twice in that epoch, or not at all; the next epoch is whole again.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.data import IterableDataset
from webdataset.filters import shuffle
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.utils import pytorch_worker_info

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import ShardEntry
from fovea.artifacts.reading import check_content, check_entry
from fovea.artifacts.schema import META, TENSORS, decode_sample
from fovea.artifacts.transport import Patience, ShardSource, read_manifest
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample

logger = logging.getLogger(__name__)


def deal(samples: int, rank: tuple[int, int], worker: tuple[int, int]) -> list[int]:
    """Numbers of the samples of an epoch that a ``rank`` of so many and a ``worker`` of so many in it take.

    See the module's docstring. Workers of one rank take equally many or one more; a worker takes as many on every rank.
    """
    number, ranks = rank
    mine = list(range(number * samples // ranks, (number + 1) * samples // ranks))
    each = -(-samples // ranks)
    mine += mine[: each - len(mine)]
    number, workers = worker
    size, more = divmod(each, workers)
    start = number * size + min(number, more)
    return mine[start : start + size + (number < more)]


class StreamedArtifacts(IterableDataset[TeacherBatch]):
    """Batches of samples from shards; give it to a loader with ``batch_size=None``.

    Args:
        location: see :func:`fovea.artifacts.transport.address`.
        batch_size: samples per batch; a worker's last batch may be smaller.
        num_workers: loader workers that will read; capped, with a notice, to the samples that each rank has.
        shuffle_buffer: samples among which the next one is drawn; 0 reads in the order of the shards.
        seed: of shuffling, together with the epoch.
        cache: folder that keeps local copies of the shards; None reads them anew in every epoch.
        feature_layers: layers whose outputs are wanted.
        collate: makes a batch of samples.
        patience: with a source that fails.

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
        patience: Patience | None = None,
    ):
        """Reads the manifest.

        Raises:
            ArtifactError: if there is none, there are fewer samples than ranks, or the layers were not exported.
        """
        super().__init__()
        patience = patience or Patience()
        self.location, self.manifest = location, read_manifest(location, patience)
        self.manifest.require_feature_layers(feature_layers, location)
        self.feature_layers, self._collate = tuple(feature_layers), collate
        self.batch_size, self.shuffle_buffer, self.seed, self.epoch = batch_size, shuffle_buffer, seed, 0
        self._begun: tuple[int, int] = (0, 0)
        # Sets with shards of the same names share a cache folder without meeting.
        digest = self.manifest.fingerprint.digest()
        self.source = ShardSource(location, patience, None if cache is None else cache / digest)
        self._shards = list(self.manifest.shards)
        if shuffle_buffer:
            random.Random(digest).shuffle(self._shards)
        _, world_size, _, _ = pytorch_worker_info()
        samples, shards = len(self.manifest), len(self._shards)
        if not samples:
            raise ArtifactError(f"the artifacts at {location} hold no sample; export again")
        if samples < world_size:
            raise ArtifactError(f"{world_size} ranks cannot share the {samples} samples at {location}; use fewer")
        self.num_workers = min(num_workers, -(-samples // world_size))
        if self.num_workers < num_workers:
            logger.warning(
                "%d samples on %d ranks leave work for %d of %d loader workers on each; using %d",
                samples, world_size, self.num_workers, num_workers, self.num_workers,
            )  # fmt: skip
        if (readers := world_size * max(1, self.num_workers)) > shards:
            logger.warning(
                "%d shards for %d readers: some are read by several of them; a smaller shard_bytes spares that",
                shards, readers,
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
        shuffler = random.Random(f"{self.seed}-{self.epoch}-{rank}-{worker}")
        samples: Iterator[TeacherSample] = self._samples((rank, world_size), (worker, workers), shuffler)
        if self.shuffle_buffer:
            samples = iter(shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=shuffler)(samples))
        samples = islice(samples, given[worker] * self.batch_size, None)
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
        shares = (deal(len(self.manifest), (rank, world_size), (worker, workers)) for worker in range(workers))
        return [-(-len(share) // self.batch_size) for share in shares]

    def _samples(
        self, rank: tuple[int, int], worker: tuple[int, int], shuffler: random.Random
    ) -> Iterator[TeacherSample]:
        """Samples dealt to a ``rank`` of so many and a ``worker`` of so many in it, shard by shard."""
        wanted = Counter(deal(len(self.manifest), rank, worker))
        ends = list(accumulate(len(shard.samples) for shard in self._shards))
        read = []
        for shard, end in zip(self._shards, ends, strict=True):
            times = [wanted[place] for place in range(end - len(shard.samples), end)]
            if any(times):
                read.append((shard, times))
        if self.shuffle_buffer:
            shuffler.shuffle(read)
        for shard, times in read:
            yield from self._shard_samples(shard, times)

    def _shard_samples(self, shard: ShardEntry, times: list[int]) -> Iterator[TeacherSample]:
        """The samples of a shard, each as often as ``times`` says, checked against the manifest.

        A source that fails on the way is asked again, and what has been given is passed over. So it is where a local
        copy turns out to be damaged.

        Raises:
            ArtifactError: if the shard is cut, damaged or another one, with the numbers.
        """
        times = list(times)
        for number in range(self.source.retries + 1):
            try:
                for place, sample in self._read(shard, times):
                    again, times[place] = times[place], 0
                    for _ in range(again):
                        yield sample
                return
            except ArtifactError as error:
                copy = self.source.forget_damaged(shard)
                if copy is None and not isinstance(error, _BrokenShardError):
                    raise
                why = str(error) if copy is None else f"the copy {copy} was damaged and is deleted ({error})"
                if number == self.source.retries:
                    if not number and copy is None:
                        raise
                    raise self.source.failed(shard, why) from error
                pause = self.source.patience.pause * 2**number
                logger.warning("%s; once more in %.0f s", why, pause)
                time.sleep(pause)

    def _read(self, shard: ShardEntry, times: Sequence[int]) -> Iterator[tuple[int, TeacherSample]]:
        """Places in the shard, and samples, of those that are still wanted, up to the last of them."""
        found, where = 0, f"{self.location} {shard.name}"
        until = max((place + 1 for place, count in enumerate(times) if count), default=0)
        if not until:
            return
        try:
            with self.source.open(shard) as stream:
                for members in group_by_keys(_tar_members(stream, shard.name)):
                    if found == len(shard.samples):
                        raise ArtifactError(f"{where} has more samples than the {found} of the manifest")
                    if META not in members or TENSORS not in members:
                        lacking = f" (sample '{members['__key__']}' lacks {META} or {TENSORS})"
                        raise _BrokenShardError(_broken(where, found, shard, lacking))
                    if times[found]:
                        sample = _decode(members, self.feature_layers)
                        check_entry(sample, shard.samples[found], where)
                        check_content(members[META], members[TENSORS], shard.samples[found], where)
                        # A command that is not read to its end complains; whoever takes samples may stop here.
                        stream.ignore_errors = True  # pyright: ignore[reportAttributeAccessIssue]
                        yield found, sample
                        stream.ignore_errors = False  # pyright: ignore[reportAttributeAccessIssue]
                    found += 1
                    if found == until < len(shard.samples):
                        stream.ignore_errors = True  # pyright: ignore[reportAttributeAccessIssue]
                        return
        except ArtifactError:
            raise
        except Exception as error:  # whatever tar reader or transport make of a broken stream
            raise _BrokenShardError(_broken(where, found, shard, f" ({error})")) from error
        if found != len(shard.samples):
            raise _BrokenShardError(_broken(where, found, shard, ""))


class _BrokenShardError(ArtifactError):
    """A shard that ended early or is no shard; it may come whole the next time."""


def _tar_members(stream: BinaryIO, name: str) -> Iterable[dict[str, Any]]:
    return tar_file_expander([{"url": name, "stream": stream}])


def _decode(members: dict[str, Any], feature_layers: Sequence[int]) -> TeacherSample:
    # bytearray: a tensor over bytes would claim to be writable.
    data = torch.frombuffer(bytearray(members[TENSORS]), dtype=torch.uint8)
    return decode_sample(members[META], data, feature_layers)[0]


def _broken(where: str, found: int, shard: ShardEntry, why: str) -> str:
    return f"{where} is cut, damaged or not ours: {found} of its {len(shard.samples)} samples could be read{why}"
