"""Ranking by value, then by id, on every path, against a stable sort."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding import ranking


def expected(values: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    found, ids = values.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k].numpy(), found[:, :k].numpy()


def equal(ours: tuple[np.ndarray, np.ndarray], wanted: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, wanted, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 4),
    entries=st.one_of(st.integers(1, 300), st.integers(600, 1500)),
    k=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 5, 60, 10**9]),
    removed=st.sampled_from([0.0, 0.0, 0.3, 0.999]),
    seed=st.integers(0, 10**6),
)
def test_all_paths_rank_as_a_stable_sort(rows, entries, k, levels, removed, seed):
    draw = torch.Generator().manual_seed(seed)
    # Few levels make ties, at the cut and elsewhere.
    values = torch.randint(levels, (rows, entries), generator=draw).float() / levels
    values[torch.rand(rows, entries, generator=draw) < removed] = -torch.inf
    k = min(k, entries)
    wanted = expected(values, k)
    assert equal(ranking.best_of(values, k), wanted)
    assert equal(ranking._by_partition(values.numpy(), k), wanted)
    assert equal(ranking._by_topk(values, k), wanted)
