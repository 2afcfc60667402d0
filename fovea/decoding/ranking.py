"""The largest of a row and their order, equal ones by lower id: what trees are grown by.

Legend: ``R`` rows, ``V`` entries of a row, ``k`` entries asked for.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

#: On a CPU ``torch.topk`` keeps a heap where V / k is above this, and below it selects from all entries, slowly.
_HEAP_FROM = 64


def best_of(values: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [R, k] and ``values`` [R, k] of the largest of ``values`` [R, V] float32, equal ones by lower id; k <= V.

    NaN must not occur.
    """
    if values.is_cpu and values.shape[1] < _HEAP_FROM * (k + 1):
        return _by_partition(values.numpy(), k)
    return _by_topk(values, k)


def _by_partition(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows, entries = values.shape
    least = np.partition(values, entries - k, axis=1)[:, entries - k, None]
    row, ids = (values >= least).nonzero()
    if len(ids) == rows * k:
        ids = ids.reshape(rows, k)
    else:  # several at the cut of some row
        ids = np.stack([_first(values[r], ids[row == r], least[r, 0], k) for r in range(rows)])
    found = np.take_along_axis(values, ids, axis=1)
    # Ids ascend, so that a stable sort puts the lower one first.
    order = np.argsort(-found, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(found, order, axis=1)


def _first(values: np.ndarray, ids: np.ndarray, least: float, k: int) -> np.ndarray:
    """The ``k`` of ascending ``ids`` that count: all above ``least``, and the lowest ids of those at it."""
    above, level = ids[values[ids] > least], ids[values[ids] == least]
    return np.sort(np.concatenate((above, level[: k - len(above)])))


def _by_topk(values: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """``torch.topk`` breaks ties as it likes: rows in which it met one are ranked again, and one entry more than asked
    for shows a tie at the cut."""
    found, ids = (part.cpu().numpy() for part in values.topk(min(k + 1, values.shape[1])))
    tied = (found[:, 1:] == found[:, :-1]).any(axis=1)
    for row in tied.nonzero()[0]:
        candidates = (values[row] >= float(found[row, k - 1])).nonzero()[:, 0]
        order = values[row, candidates].sort(descending=True, stable=True).indices[:k]
        ids[row, :k] = candidates[order].cpu().numpy()
        found[row, :k] = values[row, candidates[order]].cpu().numpy()
    return ids[:, :k], found[:, :k]
