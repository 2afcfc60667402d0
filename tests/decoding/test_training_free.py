"""Losslessness of the training-free methods, on targets that repeat themselves enough for drafts to be accepted."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.drafters.jacobi_lookahead import JacobiConfig
from fovea.drafters.pld import PLDConfig
from fovea.drafters.training_free import LookaheadConfig, TrainingFree
from fovea.drafters.trie_lookahead import TrieConfig

METHODS = {
    "pld": TrainingFree("pld", PLDConfig()),
    "pld, in text": TrainingFree("pld", PLDConfig(2, 4, "in_text")),
    "pld, cut": TrainingFree("pld", PLDConfig(4, 6, "cut")),
    "trie": TrainingFree("lookahead", LookaheadConfig()),
    "trie, isolated": TrainingFree("lookahead", LookaheadConfig(trie=TrieConfig(24, 5, 3, isolate=True))),
    "trie, small": TrainingFree("lookahead", LookaheadConfig(trie=TrieConfig(5, 2, 1, max_nodes=20))),
    "jacobi": TrainingFree("lookahead", LookaheadConfig("jacobi")),
    "jacobi, from prompt": TrainingFree(
        "lookahead", LookaheadConfig("jacobi", jacobi=JacobiConfig(3, 2, 2, pool_from_prompt=True))
    ),
}


#: Answers that are drawn, and answers that repeat no three tokens.
SAMPLED = Selection({"temperature": 0.7, "top_p": 0.8}, sampled=True)
PROCESSED = Selection({"no_repeat_ngram_size": 3, "repetition_penalty": 1.1})


@pytest.fixture(params=METHODS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def method(request) -> TrainingFree:
    return METHODS[request.param]


def talkative(table_target, seed: int, eos: tuple[int, ...] = (), vocab: int = 3):
    """A target of few words and a prompt of them: what it says was often said before, and as often not."""
    random = np.random.default_rng(seed)
    target = table_target(random.normal(size=(257, vocab)).astype(np.float32), eos_ids=eos)
    return target, target.encode_ids(random.integers(vocab, size=random.integers(1, 40)).tolist())


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(METHODS)),
    seed=st.integers(0, 10**6),
    cap=st.integers(1, 50),
    eos=st.sampled_from([(), (0,), (1, 2)]),
    vocab=st.integers(2, 6),
    selection=st.sampled_from([GREEDY, GREEDY, SAMPLED, PROCESSED]),
)
def test_drafts_never_change_the_answer(name, seed, cap, eos, vocab, selection, table_target):
    eos = tuple(token for token in eos if token < vocab)
    target, encoded = talkative(table_target, seed, eos, vocab)
    proposer = METHODS[name].proposer(target.spec)
    baseline = generate_autoregressive(target, encoded, max_new_tokens=cap, selection=selection)
    for _ in range(2):  # the second time a memory knows the whole answer
        target.cache_lengths.clear()
        trace = generate(target, proposer, encoded, max_new_tokens=cap, selection=selection)
        assert (trace.tokens, trace.finish) == (baseline.tokens, baseline.finish)
        assert sum(r.committed for r in trace.rounds) + 1 == len(trace.tokens)
        assert all(r.draft_nodes <= proposer.max_drafts for r in trace.rounds)
        committed = np.cumsum([r.committed for r in trace.rounds])
        assert target.cache_lengths == (len(encoded.ids) + committed).tolist()


def test_drafts_are_accepted_and_rejected(method, table_target):
    accepted, drafted, rounds = 0, 0, 0
    for seed in range(12):
        target, encoded = talkative(table_target, seed)
        trace = generate(target, method.proposer(target.spec), encoded, max_new_tokens=60)
        accepted += sum(r.accepted for r in trace.rounds)
        drafted += sum(r.tree_depth for r in trace.rounds)
        rounds += len(trace.rounds)
        assert all(r.committed <= method.settings()["most_tokens_per_round"] for r in trace.rounds)
    assert 0.05 * rounds < accepted < drafted


def test_an_end_token_within_a_draft_ends_the_answer(method, table_target):
    """The prompt is full of end tokens, and drafts copy them; what a draft holds behind one is not committed."""
    ended_by_draft = 0
    for seed in range(60):
        target, encoded = talkative(table_target, seed, eos=(0,))
        proposer = method.proposer(target.spec)
        baseline = generate_autoregressive(target, encoded, max_new_tokens=60)
        for _ in range(2):
            trace = generate(target, proposer, encoded, max_new_tokens=60)
            assert (trace.tokens, trace.finish) == (baseline.tokens, baseline.finish)
            last = trace.rounds[-1] if trace.rounds else None
            ended_by_draft += trace.finish == "eos" and last is not None and last.accepted == last.committed
    assert ended_by_draft > 0


def test_a_memory_shortens_the_second_answer(table_target):
    target, encoded = talkative(table_target, 1)
    proposer = METHODS["trie"].proposer(target.spec)
    rounds = [len(generate(target, proposer, encoded, max_new_tokens=60).rounds) for _ in range(2)]
    assert rounds[1] <= 60 // 5 < rounds[0]
    proposer.forget()
    assert len(generate(target, proposer, encoded, max_new_tokens=60).rounds) == rounds[0]


def test_where_nothing_matches_every_round_is_an_autoregressive_step(table_target):
    """A tree of the root alone goes through loop, trace and accounting, and costs the target one row."""
    table = np.full((257, 300), -1.0, dtype=np.float32)
    # Another token in every pass, whatever came before.
    target = table_target(table)
    target.lm_head = lambda hidden: torch.nn.functional.one_hot(
        torch.full(hidden.shape[:-1], 40) + len(target.extended_rows), 300
    ).float()
    encoded = target.encode_ids([1, 2, 3])
    for name in ("pld", "pld, cut", "trie"):
        target.extended_rows.clear()
        trace = generate(target, METHODS[name].proposer(target.spec), encoded, max_new_tokens=20)
        assert len(set(trace.tokens)) == len(trace.tokens) == 20
        assert {(r.draft_nodes, r.tree_depth, r.accepted, r.committed) for r in trace.rounds} == {(0, 0, 0, 1)}
        assert target.extended_rows == [3] + [1] * 19


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_what_is_looked_up(length, method, table_target):
    target = table_target(np.random.default_rng(3).normal(size=(257, 3)).astype(np.float32))
    encoded = target.encode_ids([0, 1, 2][:length])
    answer = generate_autoregressive(target, encoded, max_new_tokens=30).tokens
    assert generate(target, method.proposer(target.spec), encoded, max_new_tokens=30).tokens == answer


CAP = 40


@pytest.fixture(scope="module")
def few_words(small_target):
    """The small target with a vocabulary of a few words, so that it repeats itself; all else as it was."""
    target = copy.deepcopy(small_target)
    head = target.model.lm_head.weight.data
    kept = torch.tensor([40, 41, 42, 43])
    head[[token for token in range(len(head)) if token not in kept]] = 0.0
    return target


@pytest.mark.parametrize("key", ["image", "two", "text"])
def test_lossless_on_a_vision_language_model(key, method, few_words, small_conversations):
    conversation = next(c for c in small_conversations if c.key == key)
    encoded = few_words.encode(replace(conversation, messages=conversation.messages[:1]))
    answer = generate_autoregressive(few_words, encoded, max_new_tokens=CAP, eos_ids=()).tokens
    assert 2 < len(set(answer)) < 6
    proposer = method.proposer(few_words.spec)
    for cap in (CAP, 7, CAP):
        trace = generate(few_words, proposer, encoded, max_new_tokens=cap, eos_ids=())
        assert (trace.tokens, trace.finish) == (answer[:cap], "cap")


def test_lossless_on_the_whole_vocabulary(method, small_target, small_conversations):
    conversation = small_conversations[3]
    encoded = small_target.encode(replace(conversation, messages=conversation.messages[:1]))
    answer = generate_autoregressive(small_target, encoded, max_new_tokens=CAP, eos_ids=()).tokens
    proposer = method.proposer(small_target.spec)
    placeholders = set(small_target.spec.placeholder_ids)
    drafted = []
    propose = proposer.propose

    def watched():
        drafted.append(propose())
        return drafted[-1]

    proposer.propose = watched
    trace = generate(small_target, proposer, encoded, max_new_tokens=CAP, eos_ids=())
    assert trace.tokens == answer
    assert not placeholders & {int(token) for tree in drafted for token in tree.tokens[1:]}
