"""The trie of n-grams beside a naive count, and the trees drawn from it beside a sorted list."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.drafters.readable_text import BARRIER
from fovea.drafters.trie_lookahead import NgramTrie, TrieConfig, TrieLookahead, TrieNode, draw_tree

TEXT = st.lists(st.sampled_from([BARRIER, 0, 1, 2]), max_size=30)


def ngrams(texts: list[list[int]], length: int) -> Counter[tuple[int, ...]]:
    """Every n-gram of up to ``length`` tokens in every text, none of which holds a barrier."""
    found = [
        tuple(text[start : start + size])
        for text in texts
        for size in range(1, length + 1)
        for start in range(len(text) - size + 1)
    ]
    return Counter(ngram for ngram in found if BARRIER not in ngram)


def counted(node: TrieNode, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    out = {path: node.count} if path else {}
    for token, child in node.children.items():
        out |= counted(child, (*path, token))
    return out


def put(texts: list[list[int]], length: int) -> NgramTrie:
    trie = NgramTrie(length)
    for text in texts:
        for start in range(0, len(text), 3):  # a text comes in pieces
            trie.extend(text[start : start + 3])
        trie.end_text()
    return trie


def paths(tree) -> list[tuple[int, ...]]:
    """Tokens below the root on the way to each draft, row by row."""
    out: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        out.append((*out[parent], int(token)))
    return out[1:]


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), length=st.integers(1, 6))
def test_the_counts_equal_a_naive_enumeration(texts, length):
    trie = put(texts, length)
    expected = ngrams(texts, length)
    assert counted(trie.root) == expected
    assert trie.size == len(expected)
    for ngram in [*expected, (0, 9), (BARRIER,)]:
        node = trie.find(ngram)
        assert (node.count if node else 0) == expected[ngram]


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), length=st.integers(1, 5), limit=st.integers(0, 60))
def test_shrinking_halves_the_counts_until_it_fits(texts, length, limit):
    trie = put(texts, length)
    expected = dict(ngrams(texts, length))
    while len(expected) > limit:
        expected = {ngram: count // 2 for ngram, count in expected.items() if count > 1}
    trie.shrink(limit)
    assert counted(trie.root) == expected
    assert trie.size == len(expected)
    trie.extend([0])
    assert trie.root.children[0].count == expected.get((0,), 0) + 1


@settings(max_examples=300, deadline=None)
@given(
    prompt=TEXT,
    answers=st.lists(TEXT, max_size=4),
    tail=st.lists(st.integers(0, 2), min_size=1, max_size=2),
    branch_length=st.integers(1, 5),
    decoding_length=st.integers(2, 40),
)
def test_a_tree_equals_what_sorting_finds(prompt, answers, tail, branch_length, decoding_length):
    """First half: the most frequent in answers. The rest: by the prompt's counts, equal ones by those in answers."""
    config = TrieConfig(decoding_length, branch_length)
    in_prompt, in_answers = put([prompt], branch_length + len(tail)), put(answers, branch_length + len(tail))
    tree = draw_tree(7, in_prompt.find(tail), in_answers.find(tail), config).finish()

    counts = [ngrams([prompt], 9), ngrams(answers, 9)]
    known = {
        ngram[len(tail) :]
        for counter in counts
        for ngram in counter
        if ngram[: len(tail)] == tuple(tail) and len(tail) < len(ngram) <= len(tail) + branch_length
    }
    frequency = {path: [counter[(*tail, *path)] for counter in counts] for path in known}
    drafts = paths(tree)
    assert tree.tokens[0] == 7
    assert len(set(drafts)) == len(drafts)
    assert set(drafts) <= known
    assert len(drafts) == min(len(known), decoding_length - 1)

    half = max(1, decoding_length // 2) - 1
    by_answers = sorted((f[1] for f in frequency.values() if f[1]), reverse=True)[:half]
    first, rest = drafts[: len(by_answers)], drafts[len(by_answers) :]
    assert [frequency[path][1] for path in first] == by_answers
    others = sorted((frequency[path] for path in known - set(first)), reverse=True)
    assert [frequency[path] for path in rest] == others[: len(rest)]


class Dialogue:
    """A proposer that is handed token ids."""

    def __init__(self, spec, make_prefill, **settings):
        self.proposer = TrieLookahead(spec, TrieConfig(**settings))
        self.prefill = make_prefill(tail=12)
        self.ids = self.prefill.ids.tolist()

    def start(self) -> Dialogue:
        self.proposer.start(self.prefill)
        return self

    def drafts(self, *tokens: int) -> set[tuple[int, ...]]:
        self.proposer.commit(torch.tensor(tokens), torch.zeros(len(tokens), 1))
        tree = self.proposer.propose()
        assert tree.tokens[0] == tokens[-1]
        return set(paths(tree))


@pytest.fixture
def dialogue(spec, make_prefill):
    return lambda **settings: Dialogue(spec, make_prefill, **settings)


def prefixes(*branches: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {branch[:end] for branch in branches for end in range(1, len(branch) + 1)}


def test_drafts_come_from_the_prompt_and_from_the_answer(dialogue):
    talk = dialogue(branch_length=3).start()
    ids = talk.ids
    token = next(token for token in ids[-12:-3] if ids.count(token) == 1)
    behind = ids.index(token) + 1
    assert talk.drafts(token) == prefixes(tuple(ids[behind : behind + 3]))
    talk.start()
    a, b, c, d, e = sorted(set(range(3, 60)) - set(ids))[:5]
    assert talk.drafts(a, b, c, d, a) == prefixes((b, c, d))
    assert talk.drafts(b, e, a, b) == prefixes((c, d, a), (e, a, b))


def test_the_longer_tail_is_enough_where_it_knows_enough(dialogue):
    a, b, c, d = 3, 4, 5, 6
    text = (a, b, c, c, c, c, d, b, d, d, d, d, a, b)
    known = set(paths_below(dialogue(branch_length=4, prefix=2).start(), text))
    assert known == prefixes((c, c, c, c))
    # Few nodes: what follows the last token alone is tried as well, and holds the other.
    short = (b, d, d, d, d, d, a, b, c, a, b)
    found = set(paths_below(dialogue(branch_length=5, prefix=2).start(), short))
    assert found == prefixes((c, a, b), (d, d, d, d, d))
    assert set(paths_below(dialogue(branch_length=4, prefix=1).start(), text)) == prefixes((c, c, c, c), (d, d, d, d))


def paths_below(talk: Dialogue, text: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Drafts behind ``text``, without what the prompt, in which these tokens may occur, adds."""
    talk.prefill.ids[~talk.prefill.is_visual] = 50
    return talk.start().drafts(*text)


@pytest.mark.parametrize("isolate", [False, True])
def test_answers_are_remembered_and_prompts_are_not(dialogue, isolate):
    talk = dialogue(branch_length=3, isolate=isolate).start()
    ids = talk.ids
    fresh = sorted(set(range(3, 60)) - set(ids))
    talk.drafts(*fresh[:4])
    talk.prefill.ids[~talk.prefill.is_visual] = fresh[9]
    talk.start()
    assert talk.drafts(fresh[0]) == (set() if isolate else prefixes(tuple(fresh[1:4])))
    assert talk.drafts(ids[-12]) == set(), "the prompt belongs to its request"
    # The end of one answer and the beginning of the next are no n-gram.
    talk.start()
    assert fresh[0] not in {path[0] for path in talk.drafts(fresh[3]) if path}
    talk.proposer.forget()
    talk.start()
    assert talk.drafts(fresh[0]) == set()


def test_pictures_are_neither_matched_nor_drafted(dialogue, spec):
    (placeholder,) = spec.placeholder_ids
    talk = dialogue(branch_length=12)
    before_picture, between = talk.ids[2], talk.ids[9]
    assert talk.ids[3] == talk.ids[10] == placeholder
    assert talk.ids[4:9] == [placeholder] * 5
    for tokens in ((placeholder,), (placeholder, placeholder), (between, placeholder)):
        assert talk.start().drafts(*tokens) == set()
    for token in (before_picture, between):
        assert placeholder not in {t for path in talk.start().drafts(token) for t in path}


def test_a_tree_stays_within_its_size(dialogue):
    talk = dialogue(decoding_length=9, branch_length=4)
    talk.start()
    for number in range(40):
        assert len(talk.drafts(3, 4, 5 + number % 7, 3, 4)) <= talk.proposer.max_drafts == 8


def test_the_defaults_are_the_published_ones():
    config = TrieConfig()
    assert (config.decoding_length, config.branch_length, config.isolate) == (64, 12, False)
    assert config.most_tokens_per_round == 13


@pytest.mark.parametrize("name", ["decoding_length", "branch_length", "prefix", "max_nodes"])
def test_numbers_too_small_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least"):
        TrieConfig(**{name: 0})
