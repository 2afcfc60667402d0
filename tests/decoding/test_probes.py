"""Probes, rows that the target runs and never accepts, and what a proposer is told about them."""

import numpy as np
import pytest

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer
from fovea.decoding.speculative import generate
from fovea.decoding.tree import TreeBuilder

VOCAB = 20


class Probing(OracleProposer):
    """The oracle's drafts, and behind them two chains of probes: one down the right answer, one of random tokens."""

    def __init__(self, answer, **settings):
        super().__init__(answer, vocab_size=VOCAB, **settings)
        self.max_drafts += 10
        self.random = np.random.default_rng(0)
        self.asked, self.told, self.committed = [], [], []

    def commit(self, tokens, states):
        super().commit(tokens, states)
        self.committed += tokens.tolist()

    def propose(self):
        tree = super().propose()
        script = self.answer[self._committed :]
        builder = TreeBuilder(self._root)
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            builder.add(token, parent)
        for chain in ((script + [0] * 5)[:5], self.random.integers(VOCAB, size=5).tolist()):
            parent = 0
            for token in chain:
                parent = builder.add(token, parent)
        probing = builder.finish(probes=10)
        assert len(probing.drafts) == len(tree)
        for column in ("tokens", "parents", "depths", "log_probs"):
            assert getattr(probing.drafts, column).tolist() == getattr(tree, column).tolist()
        self.asked.append((list(self.committed), probing))
        return probing

    def observe(self, choices):
        self.told.append(choices)


@pytest.mark.parametrize("wrong_from", [1, 3, None])
@pytest.mark.parametrize("width", [1, 2])
def test_probes_are_run_and_reported_but_never_accepted(width, wrong_from, table_target):
    table = np.random.default_rng(5).normal(size=(257, VOCAB)).astype(np.float32)
    target = table_target(table)
    encoded = target.encode_ids([3, 1, 4])
    answer = generate_autoregressive(target, encoded, max_new_tokens=40).tokens
    proposer = Probing(answer, depth=4, width=width, wrong_from=wrong_from)
    trace = generate(target, proposer, encoded, max_new_tokens=40)

    assert trace.tokens == answer
    right = (wrong_from or 5) - 1
    assert all(r.accepted == right for r in trace.rounds[:-1]), "a probe carried the right token"
    assert {(r.draft_nodes, r.tree_depth) for r in trace.rounds} == {(proposer.max_drafts - 10, 4)}
    assert len(proposer.told) == len(trace.rounds) > 4
    for (committed, tree), choices in zip(proposer.asked, proposer.told, strict=True):
        for row in range(len(tree)):
            path, node = [], row
            while node > 0:
                path.append(int(tree.tokens[node]))
                node = tree.parents[node]
            text = target.encode_ids([3, 1, 4, *committed, *reversed(path)])
            assert choices[row] == generate_autoregressive(target, text, max_new_tokens=1).tokens[0]


@pytest.mark.parametrize("cap", [1, 2, 7, 40])
def test_a_proposer_is_handed_every_token(cap, table_target):
    target = table_target(np.random.default_rng(5).normal(size=(257, VOCAB)).astype(np.float32))
    encoded = target.encode_ids([3, 1, 4])
    answer = generate_autoregressive(target, encoded, max_new_tokens=cap).tokens
    proposer = Probing(answer, depth=4)
    generate(target, proposer, encoded, max_new_tokens=cap)
    assert proposer.committed == answer


def test_paths_share_their_common_nodes():
    builder = TreeBuilder(9)
    for path in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [2]):
        builder.add_path(path)
    tree = builder.finish()
    assert tree.tokens.tolist() == [9, 1, 2, 3, 4, 5, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2, 4, 0]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 4, 1]
    assert tree.drafts is tree
