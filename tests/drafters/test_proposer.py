"""The proposer against a drafter that is run over the whole text for every node, without cache, tree or batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding.growth import TreeConfig
from fovea.decoding.tree import DraftTree
from fovea.drafters.fovea import FoveaDrafter
from fovea.drafters.proposer import NeuralProposer, best_children
from fovea.targets.base import Prefill
from fovea.visual.prefix import kept_in_prefix
from fovea.visual.retrieval import RetrievalConfig

TREE = TreeConfig(width=3, depth=3, nodes=16)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "one block": {"num_blocks": 1},
    "every depth corrected": {"max_correction_depth": 4},
    "never corrected": {"max_correction_depth": -1},
    "corrected recursion": {"recursion": "corrected"},
    "cross attention": {"feature_injection": "cross_attention"},
    "no features": {"feature_injection": "none"},
    "plain positions": {"rope": "1d"},
    "prefix without pictures": {"visual_prefix": "none"},
    "prefix with some": {"visual_prefix": "topk", "visual_prefix_ratio": 0.5},
    "no gate": {"use_gate": False},
    "no depth embedding": {"use_depth_embedding": False},
    "once per block": {"retrieval": RetrievalConfig(mode="once_per_block", k=3)},
    "static image": {"retrieval": RetrievalConfig(mode="static_image", k=3)},
}


def causal(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


class Text:
    """Committed pairs of a request, kept as a plain list."""

    def __init__(self, drafter: FoveaDrafter, prefill: Prefill) -> None:
        self.drafter, self.visual = drafter, prefill.visual
        length = len(prefill.ids)
        plain = drafter.config.rope == "1d"
        self.positions = torch.arange(length)[None] if plain else prefill.positions
        self.next_position = int(self.positions.max()) + 1
        kept = kept_in_prefix(
            prefill.visual, prefill.is_visual, drafter.config.visual_prefix, drafter.config.visual_prefix_ratio
        )
        rows = [t for t in range(length - 1) if kept[t + 1]]
        self.embeds = [prefill.embeds[t + 1] for t in rows]
        self.states = [prefill.hidden[t] for t in rows]
        self.places = [self.positions[:, t + 1].tolist() for t in rows]

    def add(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        for token, state in zip(tokens, states, strict=True):
            self.embeds.append(self.drafter.head.embedding[token])
            self.states.append(state)
            self.places.append([self.next_position] * len(self.positions))
            self.next_position += 1

    def run(self, embeds: list, states: list, places: list) -> torch.Tensor:
        rotation = self.drafter.rotary(torch.tensor(places).T, torch.float32)
        h, _ = self.drafter(torch.stack(embeds)[None], torch.stack(states)[None], rotation, causal)
        return h[0, -1:]

    def logits_along(self, path: list[int]) -> torch.Tensor:
        """Draft logits [V] at the end of the tokens ``path`` below the root."""
        memory = self.drafter.remember(self.visual)
        embeds, states, places = list(self.embeds), list(self.states), list(self.places)
        root = None
        for depth in range(len(path) + 1):
            scored = self.drafter.score(self.run(embeds, states, places), depth, memory, root)
            root = scored.retrieved.selected if scored.retrieved is not None and depth == 0 else root
            if depth < len(path):
                embeds.append(self.drafter.head.embedding[path[depth]])
                states.append(scored.passed_on[0])
                places.append([self.next_position + depth] * len(self.positions))
        return self.drafter.logits(scored.hat)[0]  # pyright: ignore[reportPossiblyUnboundVariable]


def paths(tree: DraftTree) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for row in range(1, len(tree)):
        found.append([*found[tree.parents[row]], int(tree.tokens[row])])
    return found


def rounds(drafter: FoveaDrafter, prefill: Prefill, tree: TreeConfig = TREE) -> tuple[NeuralProposer, Text, Callable]:
    """A proposer and its plain counterpart, and a function that commits the same random tokens to both."""
    proposer, text = NeuralProposer(drafter, tree), Text(drafter, prefill)
    draw = torch.Generator().manual_seed(9)

    def commit(count: int, states: torch.Tensor | None = None) -> None:
        tokens = torch.randint(3, drafter.spec.vocab_size - 1, (count,), generator=draw)
        states = torch.randn(count, drafter.spec.hidden_size, generator=draw) if states is None else states
        proposer.commit(tokens, states)
        text.add(tokens, states)

    proposer.start(prefill)
    commit(1, prefill.hidden[-1:])
    return proposer, text, commit


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_scores_as_a_plain_run_over_its_path(
    variant: str, make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    """Positions, masks, recursion, correction and caches of several rounds, all at once: the tree gate."""
    drafter = make_drafter(**VARIANTS[variant])
    proposer, text, commit = rounds(drafter, make_prefill())
    for accepted in (3, 1, 2):
        tree = proposer.propose()
        along = paths(tree)
        assert len(tree) == TREE.nodes
        for row in range(1, len(tree)):
            log_probs = text.logits_along(along[row][:-1]).log_softmax(-1)
            step = tree.log_probs[row] - tree.log_probs[tree.parents[row]]
            assert step == pytest.approx(log_probs[tree.tokens[row]].item(), abs=1e-4)
            parent_depth = len(along[row]) - 1
            if parent_depth == 0:
                best = log_probs.topk(TREE.width).indices.tolist()
                assert tree.tokens[row] in best
        commit(accepted)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["default", "cross attention", "prefix with some", "plain positions"])
def test_cache_equals_that_of_a_fresh_run_with_true_states(
    variant: str, make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    """The cache gate: tree rows leave nothing behind, accepted tokens are run with the target's states."""
    drafter = make_drafter(**VARIANTS[variant])
    proposer, text, commit = rounds(drafter, make_prefill())
    for count in (1, 4, 2):
        proposer.propose()
        commit(count)
    proposer.propose()
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        fresh[layer] = keys, values
        return causal(layer, queries, keys, values)

    rotation = drafter.rotary(torch.tensor(text.places).T, torch.float32)
    drafter(torch.stack(text.embeds)[None], torch.stack(text.states)[None], rotation, record)
    length = proposer.cache.length
    assert (length, proposer.cache.pending) == (len(text.embeds), 0)
    for layer, (keys, values) in fresh.items():
        torch.testing.assert_close(proposer.cache.buffer[layer, 0, :, :, :length], keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(proposer.cache.buffer[layer, 1, :, :, :length], values, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cache_is_byte_identical_with_the_correction_on_and_off(
    make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    caches, trees = [], []
    for deepest in (4, -1):
        proposer, _, commit = rounds(make_drafter(max_correction_depth=deepest), make_prefill())
        for count in (2, 3):
            trees.append(proposer.propose())
            commit(count)
        proposer.propose()
        caches.append(proposer.cache.buffer[..., : proposer.cache.length, :].clone())
    assert torch.equal(caches[0], caches[1])
    assert not np.array_equal(trees[0].log_probs, trees[2].log_probs)


@torch.no_grad()
def test_a_request_starts_from_nothing_and_text_has_no_memory(
    make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    drafter = make_drafter()
    proposer, _, _ = rounds(drafter, make_prefill(seed=3, pictures=False))
    alone = proposer.propose()
    assert alone.retrieval == []
    other = NeuralProposer(drafter, TREE)
    other.start(make_prefill(seed=4))
    other.commit(torch.tensor([5]), torch.randn(1, drafter.spec.hidden_size))
    other.propose()
    other.commit(torch.tensor([6]), torch.randn(1, drafter.spec.hidden_size))
    prefill = make_prefill(seed=3, pictures=False)
    other.start(prefill)
    other.commit(torch.randint(3, 60, (1,), generator=torch.Generator().manual_seed(9)), prefill.hidden[-1:])
    again = other.propose()
    assert np.array_equal(alone.tokens, again.tokens)
    assert np.array_equal(alone.log_probs, again.log_probs)


@torch.no_grad()
def test_trace_gets_a_cardinality_per_corrected_node(
    make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    rule = RetrievalConfig(rho=0.6, k_min=2, k_max=5)
    proposer, _, commit = rounds(make_drafter(max_correction_depth=1, retrieval=rule), make_prefill())
    for _ in range(2):
        tree = proposer.propose()
        assert len(tree.retrieval) == 1 + TREE.width
        assert all(k == max(2, k_raw) and 1 <= k_raw <= 5 for k, k_raw in tree.retrieval)
        commit(2)


@torch.no_grad()
@pytest.mark.parametrize("tree", [TreeConfig(1, 4, 5), TreeConfig(5, 1, 11), TreeConfig(2, 2, 9, levels="strict")])
def test_chains_and_bushes_fit_the_cache(
    tree: TreeConfig, make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    """The cache holds the request's capacity and the tree, also when the drafts reach the last position."""
    prefill = make_prefill()
    capacity = len(prefill.ids) + 4 + tree.max_drafts
    drafter = make_drafter()
    proposer, text, commit = rounds(drafter, make_prefill(capacity=capacity), tree)
    for _ in range(3):
        grown = proposer.propose()
        log_probs = text.logits_along([]).log_softmax(-1)
        assert grown.log_probs[1] == pytest.approx(log_probs.max().item(), abs=1e-4)
        commit(1)


@torch.no_grad()
def test_pairs_may_come_in_several_calls(
    make_drafter: Callable[..., FoveaDrafter], make_prefill: Callable[..., Prefill]
) -> None:
    drafter = make_drafter()
    one, _, commit_one = rounds(drafter, make_prefill())
    two, _, commit_two = rounds(drafter, make_prefill())
    states = torch.randn(3, drafter.spec.hidden_size)
    commit_one(3, states)
    for row in range(3):
        commit_two(1, states[row : row + 1])
    first, second = one.propose(), two.propose()
    assert first.tokens[0] == second.tokens[0]
    np.testing.assert_allclose(first.log_probs, second.log_probs, rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=4),
    width=st.integers(1, 9),
)
def test_children_are_sorted_with_ties_by_lower_id(rows: list[list[int]], width: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float32)
    ids, log_probs = best_children(logits, width)
    for row, values in enumerate(rows):
        expected = sorted(range(7), key=lambda i, v=values: (-v[i], i))[:width]
        assert ids[row].tolist() == expected
        np.testing.assert_allclose(log_probs[row], logits[row].log_softmax(-1)[expected], rtol=1e-6, atol=1e-6)


def test_children_of_zero_probability_are_marked() -> None:
    ids, log_probs = best_children(torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]]), 3)
    assert ids[0].tolist() == [3, 1, 0]
    assert log_probs[0, 2] == -np.inf
