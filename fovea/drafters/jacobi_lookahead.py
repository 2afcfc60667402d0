"""Lookahead decoding (Fu et al. 2024): the target's own Jacobi iteration makes the n-grams that are drafted.

A window of guesses about the next tokens is refined by the target itself: every round its rows ride along in the
verification pass as probes, and what the target chooses behind them is the window's newest level. A column of the
window, read from its oldest level to the newest, is an n-gram that the target has written; it goes into a pool, and the
pool's n-grams that begin with the last committed token are the drafts. Nothing is learned.

Legend: ``N`` tokens of an n-gram, ``W`` columns of the window, ``G`` n-grams that are drafted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.drafters.readable_text import BARRIER, readable, readable_prompt
from fovea.targets.base import Prefill, TargetSpec


@dataclass(frozen=True)
class JacobiConfig:
    """Sizes of window and pool; the defaults are those published for 7B models.

    Attributes:
        level: N, tokens of an n-gram; the window keeps N - 1 levels.
        window: W, columns of the window.
        guess_set: G, n-grams kept per first token, the least recently seen one goes first.
        pool_from_prompt: n-grams of prompt and answer enter the pool too.
        seed: of the prompt tokens that the window starts with.
    """

    level: int = 5
    window: int = 7
    guess_set: int = 7
    pool_from_prompt: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("level", 3), ("window", 1), ("guess_set", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def most_tokens_per_round(self) -> int:
        """All tokens of an n-gram but its first, which is the root, and the target's own."""
        return self.level


class NgramPool:
    """N-grams by their first token, at most ``guess_set`` each; the least recently added one makes room."""

    def __init__(self, guess_set: int) -> None:
        self.guess_set = guess_set
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Adds ``ngram``, or makes it the most recent; one with a barrier is left out."""
        first, *rest = ngram
        if BARRIER in ngram:
            return
        known = self._ngrams.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self.guess_set:
            del known[next(iter(known))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What followed ``token``: N - 1 tokens per n-gram, the most recent one last."""
        return list(self._ngrams.get(token, ()))


class JacobiWindow:
    """Levels of guesses about the tokens behind the root, the oldest first.

    Level 0 is a chain behind the root, which counts as its column 0. Level l, column i is what the target chose behind
    column i of level l - 1 when that was the newest; it stands i + l tokens behind the root and hangs below its column.
    A new window has level 0 alone and gains one with every token; until it has N - 1 its levels are longer, since each
    token also uses up their first column.
    """

    def __init__(self, level: int, window: int, draw: Callable[[int], list[int]]) -> None:
        """``draw(k)`` gives the k tokens that level 0 starts with."""
        self.full = level - 1
        self.levels = [draw(window + level - 3)]

    @staticmethod
    def most_guesses(level: int, window: int) -> int:
        """Most guesses of a window at any time."""
        longest = window + level - 3
        return max(longest - more + more * (longest - more + 1) for more in range(level - 1))

    def add_to(self, tree: TreeBuilder) -> int:
        """Adds the guesses below the root of ``tree``, level by level; how many they are."""
        before = len(tree)
        heads = [0]
        for token in self.levels[0]:
            heads.append(tree.add(token, heads[-1]))
        for guesses in self.levels[1:]:
            heads = [tree.add(token, head) for token, head in zip(guesses, heads, strict=True)]
        return len(tree) - before

    def advance(self, root: int, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Moves on by a token; ``choices`` are the target's behind the guesses of the last level, below ``root``.

        Returns:
            The n-grams that the columns of a full window have become; none while it fills.
        """
        oldest, *newer = self.levels
        if len(self.levels) == self.full:
            columns = zip([root, *oldest], *newer, choices, strict=True)
            self.levels = [newer[0][1:], *newer[1:], list(choices)]
            return list(columns)
        # What was chosen behind a column below the root would be the root itself by now.
        newest = list(choices[1:] if newer else choices)
        self.levels = [guesses[1:] for guesses in self.levels] + [newest]
        return []


class JacobiLookahead:
    """Drafts n-grams of the pool, and sends the window along as probes."""

    def __init__(self, spec: TargetSpec, config: JacobiConfig) -> None:
        self.config = config
        guesses = config.guess_set * (config.level - 1)
        self.max_drafts = guesses + JacobiWindow.most_guesses(config.level, config.window)
        self._placeholder_ids = frozenset(spec.placeholder_ids)

    def start(self, prefill: Prefill) -> None:
        """Starts with an empty pool, or that of the prompt, and a window of random tokens of the prompt."""
        config = self.config
        prompt = readable_prompt(prefill, self._placeholder_ids)
        written = [token for token in prompt if token != BARRIER] or [0]
        random = Random(config.seed)
        self._draw = lambda count: random.choices(written, k=count)
        self._pool = NgramPool(config.guess_set)
        self._window = JacobiWindow(config.level, config.window, self._draw)
        self._choices: Sequence[int] = ()
        self._text: list[int] = []
        self._take_in(prompt)

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Takes in ``tokens``; the states are of no use here."""
        ids = tokens.tolist()
        self._next_root = ids[-1]
        self._take_in(readable(ids, self._placeholder_ids))

    def observe(self, choices: Sequence[int]) -> None:
        """Keeps the target's choices for the next :meth:`propose`."""
        self._choices = choices

    def propose(self) -> DraftTree:
        """The n-grams that begin with the last token, and the window behind them."""
        if self._choices:
            newest = readable(self._choices[-len(self._window.levels[-1]) :], self._placeholder_ids)
            newest = [self._draw(1)[0] if token == BARRIER else token for token in newest]
            for ngram in self._window.advance(self._root, newest):
                self._pool.add(ngram)
            self._choices = ()
        self._root = self._next_root
        tree = TreeBuilder(self._root)
        for ngram in self._pool.behind(self._root):
            tree.add_path(ngram)
        return tree.finish(probes=self._window.add_to(tree))

    def _take_in(self, tokens: list[int]) -> None:
        """Adds the n-grams that end with one of ``tokens``, if the pool is to have them."""
        if not self.config.pool_from_prompt:
            return
        level = self.config.level
        text = self._text + tokens
        for start in range(len(text) - level + 1):
            self._pool.add(text[start : start + level])
        self._text = text[-(level - 1) :]
