"""Epochs that a training can leave in the middle and come back to, on the same number of ranks or on another.

The order of an epoch is a function of seed and epoch alone, and ranks take turns in it, so what has been trained on is
always its beginning. A checkpoint keeps how long that is; the rest is dealt to the ranks that there are then, and
nothing that was seen is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from webdataset.utils import pytorch_worker_info

from datamodules.identity import samples_digest
from datamodules.read_ahead import read_ahead
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.streaming import StreamedArtifacts

logger = logging.getLogger(__name__)


class EpochSampler(DistributedSampler[int]):
    """Numbers of the samples of an epoch, or of what is left of it, evenly for all ranks.

    Every sample is taken once. So that all ranks take equally many, up to ``num_replicas - 1`` of the first ones come
    again at the end. Used on one rank too: Lightning tells it the epoch.

    Args:
        length: samples of an epoch, over all ranks.
        num_replicas: ranks.
        rank: of this process.
        shuffle: whether the order is drawn anew each epoch, or is that of the numbers.
        seed: of the orders, together with the epoch.
    """

    def __init__(
        self, length: int, *, num_replicas: int = 1, rank: int = 0, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__(range(length), num_replicas, rank, shuffle=shuffle, seed=seed)  # pyright: ignore[reportArgumentType]
        self.length = length
        self._begun: tuple[int, int] = (0, 0)

    def begin_at(self, epoch: int, taken: int, rule: dict[str, Any] | None = None) -> None:
        """The first ``taken`` samples of ``epoch``, over all ranks, have been trained on; other epochs are whole.

        Raises:
            ArtifactError: the samples came by another ``rule``.
        """
        for name, now in self.rule().items():
            if rule and taken and rule.get(name, now) != now:
                raise ArtifactError(
                    f"the run was left within an epoch whose order {name}={rule[name]} made, and it is {now} now; "
                    "resume it with the settings that it had, or start a new training from its weights with init_from"
                )
        self._begun = (epoch, taken)

    def rule(self) -> dict[str, Any]:
        """What decides the order beside the samples, as plain types."""
        return {"seed": self.seed, "shuffle": self.shuffle}

    def state(self) -> dict[str, Any]:
        """What checkpoints keep of the order."""
        return self.rule()

    @property
    def taken(self) -> int:
        """Samples, over all ranks, that the epoch does without."""
        epoch, taken = self._begun
        return taken if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        rest = order[self.taken :]
        missing = -len(rest) % self.num_replicas
        again = order.repeat(-(-missing // max(len(order), 1)))[:missing]
        return iter(torch.cat([rest, again])[self.rank :: self.num_replicas].tolist())

    def taken_here(self) -> list[int]:
        """Those of the taken samples that were this rank's, if there were as many ranks."""
        return self._order()[: self.taken][self.rank :: self.num_replicas].tolist()

    def _order(self) -> Tensor:
        """[length] int64 the samples of the epoch, over all ranks."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))


class EpochLoader(DataLoader):
    """Batches of an epoch, or of what is left of it; Lightning keeps its state in checkpoints.

    Args:
        data: samples by number.
        sampler: which of them, in which order; another than an :class:`EpochSampler` (Lightning's, where a few batches
            are to be overfitted) always begins at the start.
        batches_done: of the epoch that is under way, as the trainer counts them.
        finish: what is done to every batch in the training process; None for nothing.
        identity: asked for a digest of the samples and their order, which an epoch is only resumed with; None for any.
        threads: of this process that make batches ahead, in the place of worker processes; 0 leaves it to these.
        settings: of the loader.
    """

    def __init__(
        self,
        data: Any,
        *,
        sampler: Any,
        batches_done: Callable[[], int],
        finish: Callable[[Any], Any] | None = None,
        identity: Callable[[], str] | None = None,
        threads: int = 0,
        **settings: Any,
    ) -> None:
        if threads:
            settings["num_workers"] = 0
        super().__init__(data, sampler=sampler, **settings)
        self._batches_done, self._finish, self._threads = batches_done, finish, threads
        self._identity = cache(identity) if identity else lambda: ""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Begins when the first batch is asked for: Lightning makes the iterator before it says which epoch it is for,
        # and workers read ahead at once.
        batches: Iterator[Any] = super().__iter__() if not self._threads else self._read_ahead()
        yield from map(self._finish, batches) if self._finish else batches

    def _read_ahead(self) -> Iterator[Any]:
        assert self.batch_sampler is not None, "samples come in batches"
        return read_ahead(self._make, self.batch_sampler, self._threads)

    def _make(self, numbers: Sequence[int]) -> Any:
        batch = self.collate_fn([self.dataset[number] for number in numbers])
        return batch.pin_memory() if self.pin_memory else batch

    def batches_before(self) -> Iterator[list[int]]:
        """Numbers of the samples of this rank's earlier batches in the epoch, from the last one back to the first."""
        sampler = self.sampler
        if isinstance(sampler, EpochSampler):
            mine = sampler.taken_here()
            for start in reversed(range(0, len(mine), self._size)):
                yield mine[start : start + self._size]

    @property
    def first_batch(self) -> int:
        """Number of the batch that the epoch begins with: 0, or further on so that it ends with the last one."""
        sampler = self.sampler
        if not isinstance(sampler, EpochSampler):
            return 0
        per_rank = -(-(sampler.length - sampler.taken) // sampler.num_replicas)
        return len(self) - -(-per_rank // self._size)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The epoch, how many of its samples all ranks have taken with the first ``batches``, and what orders them.

        Without ``batches`` it is as many as the trainer counts now.
        """
        sampler = self.sampler
        if not isinstance(sampler, EpochSampler):
            return {}
        done = (self._batches_done() if batches is None else batches) - self.first_batch
        taken = sampler.taken + done * self._size * sampler.num_replicas
        place = {"epoch": sampler.epoch, "taken": min(taken, sampler.length), "length": sampler.length}
        return {**place, "samples": self._identity(), "rule": sampler.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up an epoch where ``state`` left it.

        Raises:
            ArtifactError: within the epoch, there are other samples than there were, or another order.
        """
        sampler = self.sampler
        if not state or not isinstance(sampler, EpochSampler):
            return
        if 0 < state["taken"] < state["length"]:
            as_many, was = state["length"] == sampler.length, state.get("samples")
            if not as_many or (was and was != self._identity()):
                now = f"{sampler.length}{' others' if as_many else ''}"
                raise ArtifactError(
                    f"the run was left within an epoch of {state['length']} samples, and there are {now} now; resume "
                    "it with the data that it had, or start a new training from its weights with init_from"
                )
        if state["taken"] < sampler.length:
            sampler.begin_at(state["epoch"], state["taken"], state.get("rule"))

    @property
    def _size(self) -> int:
        assert self.batch_size is not None
        return self.batch_size


class StreamLoader(DataLoader):
    """Batches of a stream; Lightning keeps in checkpoints behind which of them a training was left.

    Args:
        data: what is streamed.
        epoch: number of the epoch that is under way; Lightning tells samplers only.
        batches_done: of that epoch, as the trainer counts them.
        finish: what is done to every batch in the training process; None for nothing.
        settings: of the loader.
    """

    def __init__(
        self,
        data: StreamedArtifacts,
        *,
        epoch: Callable[[], int],
        batches_done: Callable[[], int],
        finish: Callable[[Any], Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(data, batch_size=None, num_workers=data.num_workers, **settings)
        self._stream, self._epoch, self._batches_done, self._finish = data, epoch, batches_done, finish

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._stream.set_epoch(self._epoch())
        yield from map(self._finish, super().__iter__()) if self._finish else super().__iter__()

    @property
    def first_batch(self) -> int:
        """Number of the batch that the epoch begins with."""
        self._stream.set_epoch(self._epoch())
        return self._stream.first_batch

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The epoch, how many ``batches`` of it are done (None: as the trainer counts), and how it is dealt."""
        done = self._batches_done() if batches is None else batches
        return {"epoch": self._stream.epoch, "batches": done, "length": len(self)} | self._dealt()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up an epoch where ``state`` left it, or about there if it is dealt to others now; says so then."""
        dealt, batches = self._dealt(), state["batches"]
        before = dealt | state  # checkpoints of older versions know less
        changed = [f"{name} was {before[name]} and is {dealt[name]}" for name in dealt if before[name] != dealt[name]]
        if batches >= state["length"]:
            return
        if changed:
            taken = batches * state["ranks"] * state["batch_size"]
            batches = min(taken // (dealt["ranks"] * dealt["batch_size"]), len(self) - 1)
            logger.warning(
                "the run was left within an epoch, and the stream is dealt otherwise now (%s): some of its samples "
                "come twice in that epoch, or not at all",
                ", ".join(changed),
            )
        self._stream.begin_at(state["epoch"], batches)

    def _dealt(self) -> dict[str, Any]:
        _, ranks, _, _ = pytorch_worker_info()
        stream = self._stream
        order = {"samples": samples_digest(stream), "seed": stream.seed, "shuffle_buffer": stream.shuffle_buffer}
        return {"ranks": ranks, "workers": stream.num_workers, "batch_size": stream.batch_size} | order
