"""Growth of the draft tree against the golden vectors and a slow recursive reference."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding.growth import TreeConfig, grow, grow_passes
from fovea.decoding.tree import DraftTree

GOLDEN = Path(__file__).parents[1] / "golden" / "tree"
CASES = json.loads((GOLDEN / "index.json").read_text())
MODULUS = 257


def next_state(state: int, token: int) -> int:
    return (31 * state + token + 1) % MODULUS


def table_expander(child_logprob: np.ndarray, root_state: int, width: int):
    """The expansion that a table of log-probabilities by state defines."""
    frontier: list[int] = []

    def expand(tokens: np.ndarray, parents: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal frontier
        if depth == 0:
            assert parents.tolist() == [-1]
            frontier = [root_state]
        else:
            frontier = [next_state(frontier[p], t) for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)]
        rows = child_logprob[frontier]
        ids = np.argsort(-rows, axis=1, kind="stable")[:, :width]
        return ids, np.take_along_axis(rows, ids, axis=1)

    return expand


def paths(tree: DraftTree) -> list[list[int]]:
    out: list[list[int]] = [[]]
    for row in range(1, len(tree)):
        out.append([*out[tree.parents[row]], int(tree.tokens[row])])
    return out


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str):
    case, arrays = CASES[name], np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
    expand = table_expander(arrays["child_logprob"], case["root_state"], case["width"])
    drafts = case["nodes"] - case["count_root"]
    tree = grow_passes(-1, expand, width=case["width"], passes=case["passes"], max_drafts=drafts)
    assert paths(tree) == case["paths"]
    assert tree.tokens.tolist() == arrays["token"].tolist()
    assert tree.parents.tolist() == arrays["parent"].tolist()
    assert tree.depths.tolist() == arrays["depth"].tolist()
    np.testing.assert_allclose(tree.log_probs, arrays["cum_logprob"], rtol=1e-6, atol=1e-6)
    assert (tree.ancestor_mask() == arrays["ancestor_mask"]).all()
    assert len(tree) - 1 == case["drafts_kept"]
    assert tree.depths.max() == case["max_depth"]


def naive_tree(table: np.ndarray, root_state: int, width: int, passes: int, max_drafts: int) -> list[list[int]]:
    """Kept paths by the definition: lists of (path, log-probability) and sorts by key, no arrays."""
    created: list[tuple[tuple[int, ...], float]] = []
    frontier: list[tuple[tuple[int, ...], float, int]] = [((), 0.0, root_state)]
    for _ in range(passes):
        added = []
        for path, score, state in frontier:
            children = sorted(range(table.shape[1]), key=lambda t: (-table[state, t], t))[:width]
            for token in children:
                if table[state, token] > -np.inf:
                    added.append(((*path, token), score + float(table[state, token]), next_state(state, token)))
        created += [(path, score) for path, score, _ in added]
        frontier = sorted(added, key=lambda child: -child[1])[:width]
    kept = sorted(range(len(created)), key=lambda i: (-created[i][1], i))[:max_drafts]
    return [[], *(list(created[i][0]) for i in sorted(kept))]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 9),
    width=st.integers(1, 5),
    passes=st.integers(1, 5),
    max_drafts=st.integers(1, 30),
    levels=st.integers(1, 4),
)
def test_equals_the_definition_also_with_many_ties(seed, vocab, width, passes, max_drafts, levels):
    # Few distinct values, -inf and 0 among them, so that ties and dead ends are the rule.
    values = np.array([0.0, -0.5, -1.0, -2.0, -np.inf], dtype=np.float32)[: levels + 1]
    table = np.random.default_rng(seed).choice(values, size=(MODULUS, vocab))
    expand = table_expander(table, 3, width)
    tree = grow_passes(-1, expand, width=width, passes=passes, max_drafts=max_drafts)
    assert paths(tree) == naive_tree(table, 3, width, passes, max_drafts)
    assert (tree.parents[1:] < np.arange(1, len(tree))).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    mask = tree.ancestor_mask()
    assert (mask.sum(1) == tree.depths + 1).all()


def test_a_log_probability_rounded_above_zero_orphans_no_child():
    def expand(tokens, parents, depth):
        return np.full((len(tokens), 1), depth), np.full((len(tokens), 1), 1e-6, dtype=np.float32)

    tree = grow(9, expand, TreeConfig(width=1, depth=4, nodes=4, levels="eagle", count_root=False))
    assert paths(tree) == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_passes_and_budget():
    assert TreeConfig().passes == 7
    assert TreeConfig(levels="strict").passes == 6
    assert TreeConfig().max_drafts == 39
    assert TreeConfig(count_root=False).max_drafts == 40


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"width": 0}, "width 0"),
        ({"depth": 0}, "depth 0"),
        ({"depth": 6, "nodes": 6}, "6 nodes holds 5 drafts, too few for depth 6"),
        ({"levels": "flat"}, "'flat'"),
    ],
)
def test_impossible_shapes_are_refused(settings_, named):
    with pytest.raises(ValueError, match=named):
        TreeConfig(**settings_)
