"""The key-value cache of one request: preallocated, appended to by forward passes, compacted after verification.

Legend: ``L`` layers, ``H`` key-value heads, ``C`` capacity in rows, ``E`` head width, ``n`` new rows.

Rows ``[0, length)`` are committed. A forward pass writes its rows behind them; they are *pending* until
:meth:`KVCache.keep` commits some of them, in any order, and drops the rest. Target and drafter use the same class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers in one buffer ``[L, 2, 1, H, C, E]``, batch 1."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, 2, 1, num_kv_heads, capacity, head_dim)
        self.buffer = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.pending = 0
        # Views are made once: slicing a six-dimensional tensor per layer and pass costs more than the copy itself.
        self._layers = [(layer[0], layer[1]) for layer in self.buffer]

    @property
    def capacity(self) -> int:
        """Rows the buffer can hold, pending ones included."""
        return self.buffer.shape[4]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``[1, H, n, E]`` behind committed and pending rows of ``layer``; returns all of its rows so far.

        The rows count as pending only after :meth:`advance`, which the caller calls once per forward pass.
        """
        start = self.length + self.pending
        end = start + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"the KV cache holds {self.capacity} rows and a pass needs {end}; allocate it larger")
        stored_keys, stored_values = self._layers[layer]
        stored_keys[:, :, start:end] = keys
        stored_values[:, :, start:end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def advance(self, rows: int) -> None:
        """Counts the rows that a finished forward pass wrote as pending."""
        self.pending += rows

    def keep(self, rows: Sequence[int]) -> None:
        """Commits the pending rows ``rows`` (0 is the first pending one), in that order, and drops all others."""
        count = len(rows)
        if count and list(rows) != list(range(count)):
            index = torch.as_tensor(rows, device=self.buffer.device) + self.length
            kept = self.buffer.index_select(4, index)
            self.buffer[:, :, :, :, self.length : self.length + count] = kept
        self.length += count
        self.pending = 0

    def clear(self) -> None:
        """Forgets all rows."""
        self.length = self.pending = 0
