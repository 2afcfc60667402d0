"""Batches that threads of the training process make while it trains.

Checksums and copies leave the interpreter to others, so threads read as fast as processes would, and nothing is copied
from one process into another: a batch of states is tens of megabytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")


def read_ahead(make: Callable[[Sequence[int]], T], batches: Iterable[Sequence[int]], threads: int) -> Iterator[T]:
    """``make(batch)`` for each of ``batches``, in their order; ``threads`` of them are under way at any time.

    What ``make`` raises is raised where its batch would have come. An iterator that is closed waits for what is under
    way and drops it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    # Threads begin on device 0, and pinned memory would open a context on it for every rank.
    settled = None if device is None else lambda: torch.cuda.set_device(device)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead", initializer=settled)
    numbers, waiting = iter(batches), deque[Future[T]]()
    try:
        waiting.extend(pool.submit(make, batch) for batch in islice(numbers, threads))
        while waiting:
            made = waiting.popleft().result()
            waiting.extend(pool.submit(make, batch) for batch in islice(numbers, 1))
            yield made
    finally:
        pool.shutdown(cancel_futures=True)
