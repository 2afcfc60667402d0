"""Verification and the stop rules."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea.decoding.selection import greedy
from fovea.decoding.stopping import cut
from fovea.decoding.tree import DraftTree
from fovea.decoding.verify import verify

CASES = json.loads((Path(__file__).parents[1] / "golden" / "verify" / "greedy.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str):
    case = CASES[name]
    expected = case["expected"]
    rows = len(case["token"])
    tree = DraftTree(*(np.array(case[field]) for field in ("token", "parent", "depth")), np.zeros(rows))
    verdict = verify(tree, case["target_argmax"].__getitem__, case["eos_ids"], case["remaining"])
    assert verdict.accepted_nodes == expected["accepted_nodes"]
    assert tree.tokens[verdict.accepted_nodes].tolist() == expected["accepted_tokens"]
    assert verdict.bonus == expected["bonus"]
    assert verdict.committed == expected["committed"]
    assert len(verdict.accepted_nodes) == expected["accepted_walk"]
    assert verdict.accepted == expected["accepted_committed"]
    assert (len(verdict.committed) > verdict.accepted) == expected["bonus_committed"]
    assert (verdict.finish or None) == expected["finish"]


@given(data=st.data())
def test_the_rows_are_those_that_chose_the_committed_tokens(data):
    rows = data.draw(st.integers(1, 25))
    parents = [-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, rows)]
    taken: dict[int, set[int]] = {}
    tokens = [0]
    for parent in parents[1:]:
        token = data.draw(st.integers(0, 30).filter(lambda t, p=parent: t not in taken.setdefault(p, set())))
        taken[parent].add(token)
        tokens.append(token)
    depths = [0] * rows
    for row in range(1, rows):
        depths[row] = depths[parents[row]] + 1
    tree = DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(rows))
    # Mostly a token that some child carries, so that the walks are long.
    choices = [data.draw(st.sampled_from([*sorted(taken.get(row, {31})), 31])) for row in range(rows)]
    eos, remaining = data.draw(st.sets(st.integers(0, 31), max_size=2)), data.draw(st.integers(1, 8))
    verdict = verify(tree, choices.__getitem__, eos, remaining)

    assert [choices[row] for row in verdict.rows] == verdict.committed
    assert all(parents[row] == before for before, row in zip(verdict.rows, verdict.rows[1:], strict=False))
    assert verdict.rows[0] == 0
    if not verdict.finish:  # the walk ended because no child carries the choice, and the bonus is that choice
        assert verdict.committed[-1] == verdict.bonus == choices[verdict.rows[-1]]
        assert verdict.bonus not in taken.get(verdict.rows[-1], set())
    assert 1 <= len(verdict.committed) <= remaining
    assert not eos & set(verdict.committed[:-1])
    assert (verdict.finish == "eos") == (verdict.committed[-1] in eos)


@pytest.mark.parametrize(
    ("tokens", "eos", "remaining", "expected"),
    [
        ([4, 5], (), 3, ([4, 5], "")),
        ([4, 5], (), 2, ([4, 5], "cap")),
        ([4, 5, 6], (), 2, ([4, 5], "cap")),
        ([4, 5, 6], (5,), 3, ([4, 5], "eos")),
        ([4, 5, 6], (5,), 2, ([4, 5], "eos")),
        ([4, 5, 6], (6,), 2, ([4, 5], "cap")),
        ([4], (4,), 1, ([4], "eos")),
    ],
)
def test_cut(tokens, eos, remaining, expected):
    assert cut(tokens, eos, remaining) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 8, 9, 513, 152_064])
def test_greedy_takes_the_lowest_of_equal_ids(dtype, width):
    logits = torch.full((3, width), -1.0, dtype=dtype)
    logits[0, :] = 2.0
    logits[1, [width // 2, width - 1]] = 3.0
    logits[2, width - 1] = 0.5
    assert greedy(logits).tolist() == [0, width // 2, width - 1]
