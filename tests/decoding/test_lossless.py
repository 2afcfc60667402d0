"""Losslessness on a real architecture in fp32: every loop gives the same tokens, whatever is drafted.

The small target's weights are large enough that a wrong position, mask or cache row changes the tokens at once; the
per-node comparison with plain forward passes would show a smaller one.
"""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer, RandomProposer
from fovea.decoding.speculative import extend_tree, generate
from fovea.decoding.transformers_generate import generate_transformers
from fovea.decoding.tree import DraftTree

CAP = 26
#: A prompt with a picture, one with two, one without.
PROMPTS = ("image", "two", "text")


@pytest.fixture(scope="module")
def prompts(small_target, small_conversations):
    """Encoded prompts by key: each conversation up to its first question."""
    return {
        conversation.key: small_target.encode(replace(conversation, messages=conversation.messages[:1]))
        for conversation in small_conversations
        if conversation.key in PROMPTS
    }


@pytest.fixture(scope="module")
def answers(small_target, prompts):
    """The autoregressive answers; end tokens are ignored, so that all have the full length."""
    return {
        key: generate_autoregressive(small_target, encoded, max_new_tokens=CAP, eos_ids=()).tokens
        for key, encoded in prompts.items()
    }


class Watched:
    """A target that notes the committed length and its cached keys behind every commit."""

    def __init__(self, target):
        self._target = target
        self.lengths: list[int] = []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def commit(self, state, rows):
        self._target.commit(state, rows)
        assert state.cache.pending == 0
        self.lengths.append(state.length)
        self.state = state


def proposers(answer: list[int], vocab: int):
    for depth, width in ((1, 1), (4, 1), (4, 3), (2, 2)):
        for wrong_from in (*range(1, depth + 1), None):
            yield OracleProposer(answer, vocab_size=vocab, depth=depth, width=width, wrong_from=wrong_from)
    yield RandomProposer(vocab_size=vocab, nodes=12, seed=1)
    yield RandomProposer(vocab_size=vocab, nodes=20, seed=2, answer=answer, hit_rate=0.7)
    yield RandomProposer(vocab_size=vocab, nodes=0)


@pytest.mark.parametrize("key", PROMPTS)
def test_every_drafter_gives_the_autoregressive_answer(key, small_target, prompts, answers):
    encoded, answer = prompts[key], answers[key]
    assert len(set(answer)) > 4, "an answer of few tokens would hide mistakes"
    for proposer in proposers(answer, small_target.spec.vocab_size):
        target = Watched(small_target)
        trace = generate(target, proposer, encoded, max_new_tokens=CAP, eos_ids=())
        assert trace.tokens == answer, vars(proposer)
        assert trace.finish == "cap"
        committed = np.cumsum([r.committed for r in trace.rounds])
        assert target.lengths == (len(encoded.ids) + committed).tolist()
        if isinstance(proposer, OracleProposer):
            right = proposer.wrong_from - 1
            assert all(r.accepted == right for r in trace.rounds[:-1])


@pytest.mark.parametrize("key", PROMPTS)
def test_transformers_gives_the_same_answer(key, small_target, prompts, answers):
    trace = generate_transformers(small_target, prompts[key], max_new_tokens=CAP, eos_ids=())
    assert (trace.tokens, trace.finish) == (answers[key], "cap")
    assert 0 < trace.prefill_s < trace.total_s


def test_all_loops_stop_alike(small_target, prompts, answers):
    """End tokens at any place and caps at any place: first token, inside a round, on the bonus."""
    encoded, answer = prompts["image"], answers["image"]
    vocab = small_target.spec.vocab_size
    for place, cap in itertools.product((0, 1, 3, 5, None), (1, 2, 5, 6, CAP)):
        eos = () if place is None else (answer[place],)
        results = [
            generate_autoregressive(small_target, encoded, max_new_tokens=cap, eos_ids=eos),
            generate_transformers(small_target, encoded, max_new_tokens=cap, eos_ids=eos),
            generate(
                small_target,
                OracleProposer(answer, vocab_size=vocab, depth=4, width=2, wrong_from=None),
                encoded,
                max_new_tokens=cap,
                eos_ids=eos,
            ),
        ]
        first_end = answer.index(answer[place]) + 1 if place is not None else CAP
        expected = answer[: min(first_end, cap)]
        assert [r.tokens for r in results] == [expected] * 3
        finish = "eos" if place is not None and first_end <= cap else "cap"
        assert [r.finish for r in results] == [finish] * 3


def test_order_and_neighbours_do_not_matter(small_target, prompts, answers):
    """Baseline, speculative, baseline again, image before text and behind it, and a request inside another one."""
    vocab = small_target.spec.vocab_size

    class Interrupted(RandomProposer):
        def __init__(self, inner_key: str, **settings):
            super().__init__(**settings)
            self.inner_key = inner_key

        def propose(self):
            run(self.inner_key, RandomProposer(vocab_size=vocab, nodes=5, seed=3))
            return super().propose()

    def run(key, proposer):
        trace = generate(small_target, proposer, prompts[key], max_new_tokens=8, eos_ids=())
        assert trace.tokens == answers[key][:8]

    for outer, inner in (("image", "two"), ("two", "text"), ("text", "image")):
        run(outer, Interrupted(inner, vocab_size=vocab, nodes=9, answer=answers[outer], hit_rate=0.8))
        baseline = generate_autoregressive(small_target, prompts[inner], max_new_tokens=8, eos_ids=())
        assert baseline.tokens == answers[inner][:8]


@pytest.mark.parametrize("key", PROMPTS)
@torch.inference_mode()
def test_every_node_has_the_logits_of_a_plain_pass(key, small_target, prompts, answers):
    """Behind a committed answer, each node of a tree sees prompt, answer and its own path, at the right positions."""
    encoded, answer = prompts[key], answers[key]
    state, _ = small_target.prefill(encoded, CAP, draft_rows=20)
    rows = torch.arange(6)
    small_target.extend(state, torch.tensor(answer[:6]), state.text_positions(rows))
    small_target.commit(state, range(6))
    random = np.random.default_rng(3)
    parents = np.array([-1, *(int(random.integers(row)) for row in range(1, 16))])
    tokens = np.array([answer[6], *random.integers(0, 200, size=15)])
    depths = np.zeros(16, dtype=np.int64)
    for row in range(1, 16):
        depths[row] = depths[parents[row]] + 1
    assert depths.max() >= 3
    logits = small_target.lm_head(extend_tree(small_target, state, DraftTree(tokens, parents, depths, -depths)))

    for row in range(16):
        path, node = [], row
        while node >= 0:
            path.append(int(tokens[node]))
            node = parents[node]
        alone, _ = small_target.prefill(encoded, CAP)
        text = torch.tensor([*answer[:6], *reversed(path)])
        hidden = small_target.extend(alone, text, alone.text_positions(torch.arange(len(text))))
        torch.testing.assert_close(logits[row], small_target.lm_head(hidden[-1]), rtol=1e-4, atol=1e-4)


def test_the_cache_behind_any_acceptance_equals_a_prefill(small_target, prompts, answers):
    encoded, answer = prompts["two"], answers["two"]
    vocab = small_target.spec.vocab_size
    for cap, seed in itertools.product((3, 9, 20), (1, 2)):
        target = Watched(small_target)
        proposer = RandomProposer(vocab_size=vocab, nodes=16, seed=seed, answer=answer, hit_rate=0.8)
        generate(target, proposer, encoded, max_new_tokens=cap, eos_ids=())
        fresh, _ = small_target.prefill(encoded, CAP)
        text = torch.tensor(answer[: cap - 1])
        small_target.extend(fresh, text, fresh.text_positions(torch.arange(cap - 1)))
        small_target.commit(fresh, range(cap - 1))
        length = target.state.length
        assert length == fresh.length == len(encoded.ids) + cap - 1
        torch.testing.assert_close(
            target.state.cache.buffer[..., :length, :], fresh.cache.buffer[..., :length, :], rtol=1e-4, atol=1e-4
        )


def test_exact_ties_of_the_head_change_nothing(small_target, prompts, answers):
    """Tokens that share a head row tie exactly wherever they win; every loop must take the lowest of them."""
    tied = copy.deepcopy(small_target)
    encoded, answer = prompts["image"], answers["image"]
    head = tied.model.lm_head.weight.data
    winners = sorted(set(answer))
    spare = [token for token in range(tied.spec.vocab_size) if token not in winners and token not in encoded.ids]
    copies = dict(zip(spare, winners, strict=False))
    for token, winner in copies.items():
        head[token] = head[winner]
    baseline = generate_autoregressive(tied, encoded, max_new_tokens=CAP, eos_ids=()).tokens
    assert any(token in copies for token in baseline), "no tie was met"
    for proposer in proposers(baseline, tied.spec.vocab_size):
        assert generate(tied, proposer, encoded, max_new_tokens=CAP, eos_ids=()).tokens == baseline
    assert generate_transformers(tied, encoded, max_new_tokens=CAP, eos_ids=()).tokens == baseline
