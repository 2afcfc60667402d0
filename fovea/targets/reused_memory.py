"""Memory for batches that is written again when no tensor holds it any more.

A batch of tens of megabytes gets fresh memory from the system each time, one page fault per 4 KiB, and that takes
several times as long as to fill it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: Smaller tensors are left to the allocator, which keeps their memory itself.
_LEAST = 1 << 20


class ReusedMemory:
    """Hands out uninitialised tensors in host memory; to several threads at a time, too.

    Args:
        kept: buffers that are kept at most while no tensor holds them. A batch has three or four large tensors.
    """

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._buffers = [bytearray(1)]
        self._free = self._references(0)
        self._buffers.clear()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose memory no other one shares; what it holds is whatever was there."""
        size = math.prod(shape) * dtype.itemsize
        if size < _LEAST:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            free = [n for n in range(len(self._buffers)) if self._references(n) == self._free]
            fitting = [n for n in free if size <= len(self._buffers[n]) <= 2 * size]
            buffer = self._buffers[fitting[0]] if fitting else bytearray(size)
            spare = [n for n in free if self._buffers[n] is not buffer]
            for n in reversed(spare[: -self._kept]):  # the oldest
                del self._buffers[n]
            if not fitting:
                self._buffers.append(buffer)
            # The tensor holds a reference to the buffer for as long as it or a view of it lives.
            return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(*shape)

    def _references(self, number: int) -> int:
        return sys.getrefcount(self._buffers[number])
