"""Prompt lookup: its search beside a naive one, and what it never looks at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.drafters.pld import PLDConfig, PLDProposer, find_continuation
from fovea.drafters.readable_text import BARRIER

RULES = ("before_tail", "in_text", "cut")


def naive(text: list[int], config: PLDConfig) -> list[int]:
    """The definition, written down: every n-gram length, every place, every condition by itself."""
    for size in range(config.max_ngram, 0, -1):
        tail = text[len(text) - size :]
        if size >= len(text) or BARRIER in tail:
            continue
        for place in range(len(text) - size):  # the last place would be the tail itself
            if text[place : place + size] != tail:
                continue
            after = text[place + size :]
            if config.continuation == "before_tail":
                after = text[place + size : len(text) - size]
            elif config.continuation == "in_text" and place + size >= len(text) - size:
                continue
            draft = after[: config.draft_tokens]
            if config.continuation == "cut":
                draft = [*draft, BARRIER][: [*draft, BARRIER].index(BARRIER)]
            elif len(draft) < config.draft_tokens or BARRIER in draft:
                continue
            if draft:
                return draft
    return []


# Few different tokens and short drafts, so that matches are common and break off in every way.
@settings(max_examples=600, deadline=None)
@given(
    text=st.lists(st.sampled_from([BARRIER, 0, 1, 2]), max_size=40),
    max_ngram=st.integers(1, 5),
    draft_tokens=st.integers(1, 6),
    rule=st.sampled_from(RULES),
)
def test_the_search_equals_a_naive_one(text, max_ngram, draft_tokens, rule):
    config = PLDConfig(max_ngram, draft_tokens, rule)
    assert find_continuation(np.array(text, dtype=np.int64), config) == naive(text, config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The longest n-gram first: 2 3 occurs at the front, 3 alone earlier.
        ([3, 9, 9, 2, 3, 7, 8, 5, 2, 3], {"before_tail": [7, 8], "in_text": [7, 8], "cut": [7, 8]}),
        # The earliest of two occurrences.
        ([1, 4, 5, 1, 6, 7, 1], {"before_tail": [4, 5], "in_text": [4, 5], "cut": [4, 5]}),
        # A draft that runs into the tail, and one that ends with the text.
        ([1, 2, 5, 2], {"before_tail": [], "in_text": [5, 2], "cut": [5, 2]}),
        ([8, 4, 4], {"before_tail": [], "in_text": [], "cut": [4]}),
        # Repetition never matches the tail itself.
        ([7], {"before_tail": [], "in_text": [], "cut": []}),
        ([], {"before_tail": [], "in_text": [], "cut": []}),
        ([1, 2, 3], {"before_tail": [], "in_text": [], "cut": []}),
        # Placeholders: not in the tail, not in an occurrence, not in a draft.
        ([1, 2, 3, 4, BARRIER, BARRIER], {"before_tail": [], "in_text": [], "cut": []}),
        ([1, 2, BARRIER, 1, 3, 3, 1], {"before_tail": [3, 3], "in_text": [3, 3], "cut": [2]}),
        ([2, 1, 5, 6, BARRIER, 1], {"before_tail": [5, 6], "in_text": [5, 6], "cut": [5, 6]}),
    ],
)
def test_by_hand(text, expected):
    found = {rule: find_continuation(np.array(text, dtype=np.int64), PLDConfig(3, 2, rule)) for rule in RULES}
    assert found == expected


def test_the_defaults_are_the_published_ones():
    config = PLDConfig()
    assert (config.max_ngram, config.draft_tokens, config.continuation) == (3, 10, "before_tail")
    assert config.most_tokens_per_round == 11


@pytest.mark.parametrize("settings", [{"max_ngram": 0}, {"draft_tokens": 0}, {"draft_tokens": -1}])
def test_numbers_below_one_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is .*; it must be at least 1"):
        PLDConfig(**settings)


def test_a_proposer_copies_from_prompt_and_answer(spec, make_prefill):
    prefill = make_prefill(tail=12)
    ids = prefill.ids.tolist()
    proposer = PLDProposer(spec, PLDConfig(max_ngram=2, draft_tokens=3))

    def propose(*tokens: int) -> list[int]:
        proposer.commit(torch.tensor(tokens), torch.zeros(len(tokens), 1))
        tree = proposer.propose()
        assert tree.tokens[0] == tokens[-1]
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
        return tree.tokens[1:].tolist()

    proposer.start(prefill)
    assert propose(ids[-10]) == ids[-9:-6]
    assert propose(7, 7, 8, 9, 10, 2) == []
    assert propose(7, 8) == [9, 10, 2]
    proposer.start(prefill)
    assert propose(7, 8) == [], "an earlier answer belongs to another text"


def test_pictures_are_neither_matched_nor_drafted(spec, make_prefill):
    """Ten equal placeholders in a row: after one of them another would be the draft, and there is no end to it."""
    (placeholder,) = spec.placeholder_ids
    prefill = make_prefill()
    assert (prefill.ids == placeholder).sum() == 10
    proposer = PLDProposer(spec, PLDConfig(max_ngram=3, draft_tokens=2, continuation="cut"))
    before_picture = prefill.ids[2].item()
    # The placeholder as an answer's token; the token before a picture; marked as visual with an id of text.
    for tokens in ([placeholder], [placeholder, placeholder], [before_picture]):
        proposer.start(prefill)
        proposer.commit(torch.tensor(tokens), torch.zeros(len(tokens), 1))
        assert len(proposer.propose()) == 1
    unwritten = min(set(range(3, placeholder)) - set(prefill.ids.tolist()))
    prefill.ids[prefill.is_visual] = unwritten
    proposer.start(prefill)
    proposer.commit(torch.tensor([unwritten]), torch.zeros(1, 1))
    assert len(proposer.propose()) == 1
