"""Table 3's interfaces: what a rebuilt cache may change, and what it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fovea.decoding.growth import TreeConfig
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.interfaces import RebuildingProposer, proposer_for
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.base import Prefill

TREE = TreeConfig(width=3, depth=3, nodes=14)


def causal(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def committed_rounds(prefill: Prefill, width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(4)
    later = [
        (torch.randint(3, 50, (count,), generator=draw), torch.randn(count, width, generator=draw))
        for count in (3, 1, 2)
    ]
    return [(torch.randint(3, 50, (1,), generator=draw), prefill.hidden[-1:]), *later]


def trees(drafter: FoveaDrafter, prefill: Prefill) -> tuple[NeuralProposer, list]:
    proposer = proposer_for(drafter, TREE)
    proposer.start(prefill)
    found = []
    for tokens, states in committed_rounds(prefill, drafter.spec.hidden_size):
        proposer.commit(tokens, states)
        found.append(proposer.propose())
    return proposer, found


@torch.no_grad()
def test_a_rebuilt_cache_changes_nothing(make_drafter: Callable, make_prefill: Callable) -> None:
    prefill = make_prefill()
    reused, expected = trees(make_drafter(), prefill)
    rebuilt, found = trees(make_drafter(interface="correction_rebuild"), prefill)
    assert type(reused) is NeuralProposer
    assert type(rebuilt) is RebuildingProposer
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.parents.tolist() == b.parents.tolist()
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)
        assert a.retrieval == b.retrieval
    assert rebuilt.cache.length == reused.cache.length


@torch.no_grad()
def test_fixed_prefix_retrieves_and_trains_nothing(make_drafter: Callable, make_prefill: Callable) -> None:
    drafter, prefill = make_drafter(interface="fixed_prefix"), make_prefill()
    _, found = trees(drafter, prefill)
    _, never = trees(make_drafter(max_correction_depth=-1), prefill)
    _, corrected = trees(make_drafter(), prefill)
    assert not any(tree.retrieval for tree in found)
    assert [tree.tokens.tolist() for tree in found] == [tree.tokens.tolist() for tree in never]
    assert [tree.tokens.tolist() for tree in found] != [tree.tokens.tolist() for tree in corrected]
    assert not any(weight.requires_grad for weight in drafter.correction.parameters())
    # The size is the same: only the switch differs.
    assert sum(p.numel() for p in drafter.parameters()) == sum(p.numel() for p in make_drafter().parameters())


@torch.no_grad()
def test_insertion_keeps_what_the_root_retrieves(make_drafter: Callable, make_prefill: Callable) -> None:
    """Against plain runs over all rows that should be there."""
    drafter, prefill = make_drafter(interface="dynamic_insertion"), make_prefill()
    proposer = proposer_for(drafter, TREE)
    proposer.start(prefill)
    memory = drafter.remember(prefill.visual)
    visual_of_row = torch.full((len(prefill.ids) - 1,), -1)
    visual_of_row[prefill.is_visual[1:]] = torch.arange(int(prefill.is_visual[1:].sum()))
    embeds, states = prefill.embeds[1:], prefill.hidden[:-1]
    positions = prefill.positions[:, 1:]
    next_position, selected = int(prefill.positions.max()) + 1, torch.ones(len(prefill.visual), dtype=torch.bool)
    seen = []

    def run(selected: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(embeds))
        visual = torch.cat((visual_of_row, torch.full((len(embeds) - len(visual_of_row),), -1)))
        rows = rows[(visual < 0) | selected[visual.clamp(min=0)]]
        rotation = drafter.rotary(positions[:, rows], torch.float32)
        return drafter(embeds[rows][None], states[rows][None], rotation, causal)[0][0, -1:]

    for tokens, new_states in committed_rounds(prefill, drafter.spec.hidden_size):
        embeds = torch.cat((embeds, drafter.embed(tokens)))
        states = torch.cat((states, new_states))
        places = torch.arange(next_position, next_position + len(tokens)).expand(len(positions), -1)
        positions, next_position = torch.cat((positions, places), dim=1), next_position + len(tokens)
        retrieved = drafter.correction.retrieve(run(selected), 0, memory)
        selected = retrieved.selected[0]
        expected = drafter.logits(drafter.norm(run(selected)))[0].log_softmax(-1)

        proposer.commit(tokens, new_states)
        tree = proposer.propose()
        children = tree.parents == 0
        assert tree.log_probs[children] == pytest.approx(expected[torch.from_numpy(tree.tokens[children])], abs=1e-4)
        assert tree.tokens[1] == int(expected.argmax())
        assert tree.retrieval == [(int(selected.sum()), int(retrieved.k_raw[0]))]
        seen.append(tuple(selected.tolist()))
    assert len(set(seen)) > 1


@torch.no_grad()
@pytest.mark.parametrize("interface", ["dynamic_insertion", "correction_rebuild"])
def test_texts_alone(interface: str, make_drafter: Callable, make_prefill: Callable) -> None:
    prefill = make_prefill(pictures=False)
    _, found = trees(make_drafter(interface=interface), prefill)
    _, expected = trees(make_drafter(), prefill)
    assert [tree.tokens.tolist() for tree in found] == [tree.tokens.tolist() for tree in expected]


def test_insertion_needs_pictures_and_a_retrieval() -> None:
    for wrong in ({"visual_prefix": "none"}, {"max_correction_depth": -1}):
        with pytest.raises(ValueError, match="interface=dynamic_insertion"):
            FoveaConfig(interface="dynamic_insertion", **wrong)
