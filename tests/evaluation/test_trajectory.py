"""Trajectories: trees, choices and evidence are those of the loop, and what is saved says the same in texts."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import generate
from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.drafters.jacobi_lookahead import JacobiConfig, JacobiLookahead
from fovea.drafters.pld import PLDConfig, PLDProposer
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.trie_lookahead import TrieConfig, TrieLookahead
from fovea.evaluation.trajectory import accepted_rows, collect_trajectory
from fovea.evaluation.trajectory_files import _Pieces, load_trajectories, save_trajectories
from fovea.visual.retrieval import RetrievalConfig

LIMITS = {"max_new_tokens": 10}


@pytest.fixture
def proposer(small_target) -> NeuralProposer:
    torch.manual_seed(0)
    config = FoveaConfig(
        num_blocks=1,
        depth=2,
        correction_width=16,
        max_correction_depth=1,
        retrieval=RetrievalConfig(k_min=2, k_max=5),
    )
    drafter = FoveaDrafter(small_target.spec, config, small_target.head).eval()
    return NeuralProposer(drafter, TreeConfig(width=2, depth=2, nodes=6))


@pytest.fixture
def prompt(small_conversations):
    return next(c for c in small_conversations if c.key == "two")


def test_rounds_are_those_of_the_trace(small_target, proposer, prompt):
    encoded = small_target.encode(prompt, [])
    plain = generate(small_target, proposer, encoded, **LIMITS)
    trajectory = collect_trajectory(small_target, proposer, encoded, **LIMITS, method="m", source="s")
    trace = trajectory.trace
    assert trace.tokens == plain.tokens
    assert (trace.method, trace.source) == ("m", "s")
    assert len(trajectory.rounds) == len(plain.rounds)
    position = 1
    for one, measured in zip(trajectory.rounds, plain.rounds, strict=True):
        assert one.position == position
        assert (one.committed, len(one.accepted)) == (measured.committed, measured.accepted)
        assert len(one.tree) - 1 == measured.draft_nodes
        assert one.tree.tokens[0] == trace.tokens[position - 1]
        committed = trace.tokens[position : position + one.committed]
        assert [one.tree.tokens[row] for row in one.accepted] == committed[: len(one.accepted)]
        path = [0, *one.accepted]
        assert [one.choices[row] for row in path][: len(committed)] == committed
        assert one.has_probabilities
        position += one.committed


def test_choices_are_what_the_target_says_alone(small_target, proposer, prompt):
    """Behind a rejected draft too: the target's answer to the prompt and the node's whole path."""
    encoded = small_target.encode(prompt, [])
    trajectory = collect_trajectory(small_target, proposer, encoded, **LIMITS)
    one = trajectory.rounds[0]
    assert len(one.choices) == len(one.tree)
    row = next(r for r in range(1, len(one.tree)) if r not in one.accepted)
    path, node = [], row
    while node > 0:
        path.append(int(one.tree.tokens[node]))
        node = int(one.tree.parents[node])
    said = encoded.followed_by([*trajectory.trace.tokens[: one.position], *reversed(path)])
    alone = generate_autoregressive(small_target, said, max_new_tokens=1)
    assert one.choices[row] == alone.tokens[0]


def test_evidence_belongs_to_the_node_that_retrieved_it(small_target, proposer, prompt, monkeypatch):
    """The rows of a pass are found by their states: each pass is run again, node by node."""
    seen: list[list[tuple[int, np.ndarray]]] = []
    plain: Callable = proposer.node_logits

    def noting(tokens, parents, depth):
        before = 0 if depth == 0 else len(proposer.evidence)
        logits = plain(tokens, parents, depth)
        if depth == 0:
            seen.append([])
        for pass_ in proposer.evidence[before:]:
            seen[-1] += [(int(token), own.numpy()) for token, own in zip(tokens, pass_.alpha, strict=True)]
        return logits

    monkeypatch.setattr(proposer, "node_logits", noting)
    trajectory = collect_trajectory(small_target, proposer, small_target.encode(prompt, []), **LIMITS)
    assert any(len(one.evidence) == 3 for one in trajectory.rounds), "the root and both of its children"
    for one, notes in zip(trajectory.rounds, seen, strict=True):
        assert 0 in one.evidence
        for row, weights in one.evidence.items():
            assert one.tree.depths[row] <= 1
            token = int(one.tree.tokens[row])
            place = next(i for i, (id_, _) in enumerate(notes) if id_ == token and (i > 0) == (row > 0))
            np.testing.assert_array_equal(weights, notes[place][1])


@pytest.mark.parametrize(
    "method",
    [
        lambda spec: PLDProposer(spec, PLDConfig()),
        lambda spec: TrieLookahead(spec, TrieConfig()),
        lambda spec: JacobiLookahead(spec, JacobiConfig()),
    ],
)
def test_methods_without_weights_have_trees_without_probabilities(small_target, prompt, method):
    encoded = small_target.encode(prompt, [])
    limits = {"max_new_tokens": 24}
    plain = generate(small_target, method(small_target.spec), encoded, **limits)
    trajectory = collect_trajectory(small_target, method(small_target.spec), encoded, **limits)
    assert trajectory.trace.tokens == plain.tokens
    assert [len(one.accepted) for one in trajectory.rounds] == [r.accepted for r in plain.rounds]
    drafted = [one for one in trajectory.rounds if len(one.tree) > 1]
    assert all(not one.has_probabilities and not one.evidence for one in drafted)
    assert [len(one.choices) for one in trajectory.rounds] == [len(one.tree) for one in trajectory.rounds]


def test_what_remembers_starts_without_the_answer(small_target, prompt):
    encoded = small_target.encode(prompt, [])
    proposer = TrieLookahead(small_target.spec, TrieConfig())
    first = collect_trajectory(small_target, proposer, encoded, **LIMITS)
    second = collect_trajectory(small_target, proposer, encoded, **LIMITS)
    assert [one.committed for one in first.rounds] == [one.committed for one in second.rounds]


def test_accepted_rows_follow_the_committed_tokens():
    builder = TreeBuilder(7)
    builder.add_path([1, 2, 3])
    builder.add_path([1, 5])
    tree: DraftTree = builder.finish()
    assert accepted_rows(tree, [1, 5, 9]) == [1, 4]
    assert accepted_rows(tree, [1, 2, 3]) == [1, 2, 3], "cut behind the last draft"
    assert accepted_rows(tree, [4]) == []


def test_files_say_the_same(small_target, small_conversations, proposer, prompt, tmp_path):
    prompts = [prompt, next(c for c in small_conversations if not c.images)]
    kept = []
    for one in prompts:
        encoded = small_target.encode(one, [])
        kept.append((one, encoded, collect_trajectory(small_target, proposer, encoded, **LIMITS)))

    def decode(ids) -> str:
        return small_target.tokenizer.decode(list(ids), skip_special_tokens=False)

    saved = save_trajectories(tmp_path, kept, decode)
    assert load_trajectories(tmp_path) == json.loads(json.dumps(saved))
    for (one, encoded, trajectory), record in zip(kept, saved, strict=True):
        assert "".join(record["texts"]) == decode(trajectory.trace.tokens)
        assert len(record["pictures"]) == len(one.images)
        for name, size in zip(record["pictures"], encoded.image_sizes, strict=True):
            picture = Image.open(tmp_path / name)
            assert max(picture.size) <= 512
            assert picture.width / picture.height == pytest.approx(size[0] / size[1], rel=0.05)
        entries = sum(rows * columns for rows, columns in record["grids"])
        for written, kept_round in zip(record["rounds"], trajectory.rounds, strict=True):
            assert written["tokens"] == kept_round.tree.tokens.tolist()
            np.testing.assert_allclose(written["log_probs"], kept_round.tree.log_probs, rtol=1e-3)
            for item in written["evidence"]:
                assert item["entries"] == entries
                assert sum(item["weights"]) == pytest.approx(1, abs=1e-2)
                np.testing.assert_array_equal(item["cells"], np.flatnonzero(kept_round.evidence[item["row"]]))
    assert saved[1]["pictures"] == []
    assert not any(written["evidence"] for written in saved[1]["rounds"])
    assert load_trajectories(tmp_path / "elsewhere") == []


def test_a_space_that_belongs_to_a_word_stays():
    """Some tokenizers drop it where a text begins."""
    words = ["the", "red", "box"]
    pieces = _Pieces(lambda ids: " ".join(words[i] for i in ids))
    assert pieces.along([0, 1, 2]) == ["the", " red", " box"]
    assert pieces.after(2, 0) == " the"


def test_a_character_of_several_tokens_stands_at_its_last():
    pieces = _Pieces(lambda ids: bytes(ids).decode(errors="replace"))
    assert pieces.along(list("aé😀".encode())) == ["a", "", "é", "", "", "", "😀"]
    assert pieces.along(list("é".encode())[:1]) == ["\ufffd"]
