"""The window of Jacobi trajectories beside plain forwards of a target made of a table, and the pool of n-grams."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.decoding.tree import TreeBuilder
from fovea.drafters.jacobi_lookahead import JacobiConfig, JacobiLookahead, JacobiWindow, NgramPool
from fovea.drafters.readable_text import BARRIER

SIZES = st.tuples(st.integers(3, 6), st.integers(1, 6))


def chosen(text: tuple[int, ...]) -> int:
    """What a target made of nothing chooses behind ``text``: it depends on every token and on its place."""
    state = 0
    for token in text:
        state = (31 * state + token + 1) % 101
    return state % 17


def path_to(tree: TreeBuilder, row: int) -> tuple[int, ...]:
    path: list[int] = []
    while row >= 0:
        path.append(tree.tokens[row])
        row = tree.parents[row]
    return tuple(reversed(path))


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_the_window_equals_the_iteration_written_down(sizes, data):
    """The window as a table of (round it was made, place in the text), each entry made from the one a round older.

    An entry of round r at place t is what the target chooses behind the tokens that its predecessor of round r - 1 at
    place t - 1 saw, and behind that one. What it saw: the text, the oldest level up to its column, and its column.
    """
    level, width = sizes
    rounds = 2 * level + 3
    draw = data.draw(st.lists(st.integers(0, 16), min_size=width + level, max_size=width + level))
    text = data.draw(st.lists(st.integers(0, 16), min_size=rounds + 1, max_size=rounds + 1))
    window = JacobiWindow(level, width, lambda count: draw[:count])

    # guess[age, place]: place counts from the start of the text; age 0 was drawn.
    guess = {(0, 1 + i): draw[i] for i in range(width + level - 3)}
    for now in range(rounds):
        # At round `now` the root is text[now]; levels are the ages of the last `level - 1` rounds.
        oldest = max(0, now - (level - 2))
        ages = range(oldest, now + 1)
        full = len(ages) == level - 1
        reach = width if full else width + level - 2 - now
        expected = [[guess[age, now + age - oldest + i] for i in range(age == oldest, reach)] for age in ages]
        assert window.levels == expected

        tree = TreeBuilder(text[now])
        rows = window.add_to(tree)
        assert rows == sum(map(len, expected)) <= JacobiWindow.most_guesses(level, width)
        last = len(window.levels[-1])
        choices = [chosen((*text[:now], *path_to(tree, row))) for row in range(len(tree))][-last:]
        for age, row in ((now + 1, i) for i in range(last)):
            column = row + (now == 0)
            place = now + now - oldest + column
            seen = (
                *text[:now],
                text[now],
                *(guess[oldest, now + k] for k in range(1, column + 1)),
                *(guess[a, now + a - oldest + column] for a in range(oldest + 1, now + 1)),
            )
            guess[age, place + 1] = chosen(seen)
            assert choices[row] == chosen(seen)

        ngrams = window.advance(text[now], choices)
        if not full:
            assert ngrams == []
            continue
        heads = [text[now], *(guess[oldest, now + i] for i in range(1, width))]
        assert ngrams == [
            (head, *(guess[oldest + step, now + step + i] for step in range(1, level))) for i, head in enumerate(heads)
        ]


@pytest.mark.parametrize("level", [3, 4, 5, 8])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_most_guesses_are_reached_and_not_exceeded(level, width):
    window = JacobiWindow(level, width, lambda count: list(range(count)))
    sizes = []
    for _ in range(level + 3):
        sizes.append(window.add_to(TreeBuilder(0)))
        window.advance(0, [1] * len(window.levels[-1]))
    assert max(sizes) == JacobiWindow.most_guesses(level, width)
    assert sizes[-1] == width - 1 + width * (level - 2)


@settings(max_examples=200, deadline=None)
@given(
    ngrams=st.lists(st.tuples(*[st.sampled_from([BARRIER, 0, 1, 2])] * 3), max_size=40),
    guess_set=st.integers(1, 4),
)
def test_the_pool_keeps_the_most_recent(ngrams, guess_set):
    pool = NgramPool(guess_set)
    expected: dict[int, OrderedDict] = {}
    for ngram in ngrams:
        pool.add(ngram)
        if BARRIER not in ngram:
            known = expected.setdefault(ngram[0], OrderedDict())
            known[ngram[1:]] = True
            known.move_to_end(ngram[1:])
            while len(known) > guess_set:
                known.popitem(last=False)
    for token in (BARRIER, 0, 1, 2, 3):
        assert pool.behind(token) == list(expected.get(token, ()))


class Told:
    """A proposer, and the target above that tells it its choices."""

    def __init__(self, spec, prefill, **settings):
        self.proposer = JacobiLookahead(spec, JacobiConfig(**settings))
        self.text = prefill.ids.tolist()
        self.proposer.start(prefill)

    def round(self, *tokens: int):
        """Commits ``tokens``, and lets the target choose behind every row of the tree."""
        self.proposer.commit(torch.tensor(tokens), torch.zeros(len(tokens), 1))
        before = (*self.text, *tokens[:-1])
        self.text += tokens
        tree = self.proposer.propose()
        builder = TreeBuilder(int(tree.tokens[0]))
        builder.tokens, builder.parents = tree.tokens.tolist(), tree.parents.tolist()
        self.proposer.observe([self.choose((*before, *path_to(builder, row))) for row in range(len(tree))])
        return tree

    choose = staticmethod(chosen)


def test_drafts_are_what_the_target_wrote_behind_the_same_token(spec, make_prefill):
    told = Told(spec, make_prefill(), level=4, window=5, guess_set=3)
    drafted = set()
    for number in range(60):
        token = chosen(tuple(told.text)) if number else 3
        tree = told.round(token)
        assert 0 < tree.probes <= JacobiWindow.most_guesses(4, 5)
        assert len(tree) - 1 <= told.proposer.max_drafts
        drafts = tree.drafts
        assert len(set(zip(drafts.parents.tolist(), drafts.tokens.tolist(), strict=True))) == len(drafts)
        assert drafts.depths.max() in (0, 3)
        if number < 3:
            assert len(drafts) == 1, "the window is not full yet"
        drafted |= set(drafts.tokens[1:].tolist())
    assert len(drafted) > 5


def test_the_pool_may_start_with_the_prompt(spec, make_prefill):
    prefill = make_prefill(tail=12)
    ids = prefill.ids.tolist()
    token = next(token for token in ids[-12:-3] if ids.count(token) == 1)
    behind = ids[ids.index(token) + 1 :][:3]
    for pool_from_prompt, expected in ((True, behind), (False, [])):
        told = Told(spec, prefill, level=4, pool_from_prompt=pool_from_prompt)
        assert told.round(token).drafts.tokens[1:].tolist() == expected
    a, b, c, d = sorted(set(range(3, 60)) - set(ids))[:4]
    told = Told(spec, prefill, level=4, pool_from_prompt=True)
    assert told.round(a, b).drafts.tokens.tolist() == [b]
    assert told.round(c, d, a).drafts.tokens.tolist() == [a, b, c, d]


def test_placeholders_are_neither_in_the_window_nor_in_the_pool(spec, make_prefill):
    (placeholder,) = spec.placeholder_ids
    prefill = make_prefill()
    told = Told(spec, prefill, level=4, pool_from_prompt=True)
    told.choose = lambda text: placeholder if chosen(text) % 3 else chosen(text)
    for token in (3, 4, placeholder, 5, 3, 4, placeholder, placeholder, 6, 3, 4, prefill.ids[2].item()):
        tree = told.round(token)
        assert placeholder not in tree.tokens[1:]
        assert tree.tokens.min() >= 0


def test_requests_start_alike(spec, make_prefill):
    told = Told(spec, make_prefill(), seed=3)
    first = [told.round(token).tokens.tolist() for token in (3, 4, 5, 3, 4, 5, 3)]
    told.proposer.start(make_prefill())
    told.text = make_prefill().ids.tolist()
    assert [told.round(token).tokens.tolist() for token in (3, 4, 5, 3, 4, 5, 3)] == first
    assert Told(spec, make_prefill(), seed=4).round(3).tokens.tolist() != first[0]


def test_the_defaults_are_the_published_ones():
    config = JacobiConfig()
    assert (config.level, config.window, config.guess_set, config.most_tokens_per_round) == (5, 7, 7, 5)


@pytest.mark.parametrize(("name", "value"), [("level", 2), ("window", 0), ("guess_set", 0)])
def test_numbers_too_small_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least"):
        JacobiConfig(**{name: value})
