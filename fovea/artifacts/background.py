"""Work that a thread does while its giver goes on, with a bounded queue between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds between two looks at whether the other side has ended.
_LOOK = 0.2


class Background(Generic[T]):
    """Calls ``work`` with every item, one after the other, in a thread of its own; a context manager.

    Leaving it waits for what is queued, also when an exception (Ctrl-C included) ends it: what was given is done.

    Args:
        work: what is done with an item.
        waiting: items that may wait; giving another one then waits too.
    """

    def __init__(self, work: Callable[[T], None], *, waiting: int) -> None:
        self._work, self._error = work, None
        self._queue: queue.Queue[tuple[T] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)

    def put(self, item: T) -> None:
        """Gives ``item`` away.

        Raises:
            Exception: that of an earlier item; nothing is done any more.
        """
        self._put((item,))
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Background[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _put(self, item: tuple[T] | None) -> None:
        while self._error is None:
            try:
                return self._queue.put(item, timeout=_LOOK)
            except queue.Full:
                continue

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._work(*item)
            except Exception as error:
                self._error = error
                return
