"""Time and memory of one answer, measured with the device idle at both ends."""

from __future__ import annotations

from time import perf_counter

import torch


class Meter:
    """Wall-clock laps. A CUDA device is synchronised at the end of each, so that a lap holds the work that it started.

    Peak memory is that of the device's allocator since the meter was made; 0 on a CPU, whose allocator keeps no count.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._start = self._last = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap ended."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        now = perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last lap."""
        return self._last - self._start

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes that tensors held on the device at any time since the start."""
        return torch.cuda.max_memory_allocated(self._cuda) if self._cuda is not None else 0
