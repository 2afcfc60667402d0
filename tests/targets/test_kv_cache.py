import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.targets.kv_cache import KVCache

LAYERS, HEADS, WIDTH = 2, 3, 4


def numbered(first: int, rows: int) -> torch.Tensor:
    """Keys [1, H, n, E] whose every number is the running number of its row."""
    return torch.arange(first, first + rows, dtype=torch.float32).view(1, 1, rows, 1).expand(1, HEADS, rows, WIDTH)


def write(cache: KVCache, first: int, rows: int) -> None:
    for layer in range(LAYERS):
        cache.append(layer, numbered(first, rows) + 1000 * layer, numbered(first, rows) + 1000 * layer + 500)
    cache.advance(rows)


def new_cache(capacity: int) -> KVCache:
    return KVCache(LAYERS, HEADS, WIDTH, capacity, dtype=torch.float32, device="cpu")


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), unique=True))))
)
def test_keeps_the_rows_asked_for_in_that_order_in_all_layers(rounds: list[tuple[int, list[int]]]) -> None:
    cache = new_cache(64 * 6)
    expected: list[int] = []
    written = 0
    for rows, kept in rounds[:32]:
        write(cache, written, rows)
        assert cache.pending == rows
        cache.keep(kept)
        expected += [written + row for row in kept]
        written += rows
        assert (cache.length, cache.pending) == (len(expected), 0)
    numbers = torch.tensor(expected, dtype=torch.float32)
    for layer in range(LAYERS):
        keys, values = cache.buffer[layer, :, 0, :, : cache.length]
        assert torch.equal(keys, (numbers + 1000 * layer)[None, :, None].expand_as(keys))
        assert torch.equal(values, (numbers + 1000 * layer + 500)[None, :, None].expand_as(values))


def test_append_returns_committed_and_new_rows() -> None:
    cache = new_cache(8)
    write(cache, 0, 3)
    cache.keep([0, 2])
    keys, values = cache.append(1, numbered(7, 2), numbered(9, 2))
    assert keys[0, 0, :, 0].tolist() == [1000.0, 1002.0, 7.0, 8.0]
    assert values[0, 0, :, 0].tolist() == [1500.0, 1502.0, 9.0, 10.0]


def test_rows_behind_pending_ones_do_not_overwrite_them() -> None:
    cache = new_cache(8)
    write(cache, 0, 2)
    write(cache, 2, 2)
    cache.keep(range(4))
    assert cache.buffer[0, 0, 0, 0, :4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_overflow_names_both_numbers_and_changes_nothing() -> None:
    cache = new_cache(4)
    write(cache, 0, 3)
    cache.keep(range(3))
    with pytest.raises(ValueError, match="holds 4 rows and a pass needs 5"):
        cache.append(0, numbered(9, 2), numbered(9, 2))
    assert cache.length == 3
    assert cache.buffer[0, 0, 0, 0, :3, 0].tolist() == [0.0, 1.0, 2.0]
