"""Threads that make batches ahead: their order, their errors, and their end."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch.utils.data import SequentialSampler

from datamodules.epochs import EpochLoader
from datamodules.read_ahead import read_ahead


class Made:
    """Makes batches that take times of their own, and counts those that were begun."""

    def __init__(self, seed: int = 0) -> None:
        self.begun, self.threads, self._draw = [], set(), random.Random(seed)

    def __call__(self, batch):
        self.begun.append(batch)
        self.threads.add(threading.current_thread().name)
        time.sleep(self._draw.random() / 500)
        return [number * 10 for number in batch]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("length", [0, 1, 5, 40])
def test_batches_come_in_their_order(threads, length) -> None:
    made, batches = Made(length), [[number, number + 1] for number in range(length)]
    assert list(read_ahead(made, batches, threads)) == [[10 * a, 10 * b] for a, b in batches]
    assert sorted(made.begun) == batches
    assert "MainThread" not in made.threads


def test_no_more_is_under_way_than_there_are_threads() -> None:
    made = Made()
    given = read_ahead(made, ([number] for number in range(100)), 3)
    assert next(given) == [0]
    given.close()
    assert len(made.begun) <= 4
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


def test_an_error_comes_where_its_batch_would_have_come() -> None:
    def make(batch):
        if batch == [3]:
            raise ValueError("the fourth is damaged")
        time.sleep(0.002)
        return batch

    given = read_ahead(make, [[number] for number in range(9)], 4)
    assert [next(given) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="the fourth"):
        next(given)


class Pinnable(list):
    """A batch that says when it was pinned."""

    def pin_memory(self):
        return ("pinned", *self)


@pytest.mark.parametrize("pin", [False, True])
def test_batches_are_pinned_where_the_loader_is_to_pin(pin) -> None:
    samples = list(range(5))
    loader = EpochLoader(
        samples, sampler=SequentialSampler(samples), batches_done=lambda: 0, threads=2, num_workers=3, batch_size=2,
        collate_fn=Pinnable, pin_memory=pin,
    )  # fmt: skip
    first = ("pinned", 0, 1) if pin else [0, 1]
    assert loader.num_workers == 0
    for _ in range(2):
        assert next(iter(loader)) == first
        assert len(list(loader)) == len(loader) == 3
