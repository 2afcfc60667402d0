"""Proposers that follow a script, for checks of the loop and of its accounting: they need no model.

Losslessness must hold whatever is drafted, so it is worth most where drafts are partly right: a perfect drafter hides
a wrong rollback, and a hopeless one never commits a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.targets.base import Prefill


class OracleProposer:
    """Knows the answer and drafts it, right down to a level and wrong from there on.

    A tree has ``depth`` levels. Each holds the right token and ``width - 1`` wrong siblings made before it, so that
    accepted rows are not contiguous; a wrong sibling has a child with the token that would be right below its brother,
    which must not be accepted. Behind the end of the answer, token 0 counts as right.

    Args:
        answer: the target's own greedy tokens, the first one included.
        vocab_size: ids below it serve as wrong tokens; at least ``width`` + 1.
        depth: levels of a tree.
        width: nodes below each right node; 1 drafts a chain.
        wrong_from: first level without the right token: 1 is never right, None always.
    """

    def __init__(
        self, answer: Sequence[int], *, vocab_size: int, depth: int, width: int = 1, wrong_from: int | None = None
    ) -> None:
        self.answer = list(answer)
        self.vocab_size = vocab_size
        self.depth = depth
        self.width = width
        self.wrong_from = depth + 1 if wrong_from is None else wrong_from
        self.max_drafts = depth * width + (depth - 1) * (width - 1)
        self._committed = 0
        self._root = 0

    def start(self, prefill: Prefill) -> None:
        """Starts the script over."""
        self._committed = 0

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Counts the tokens."""
        self._committed += len(tokens)
        self._root = int(tokens[-1])

    def propose(self) -> DraftTree:
        """The next ``depth`` tokens of the answer, as the script has them."""
        script = self.answer[self._committed : self._committed + self.depth]
        script += [0] * (self.depth - len(script))
        tree = TreeBuilder(self._root)
        parent = 0
        for level, right in enumerate(script, start=1):
            wrong_tokens = [(right + offset) % self.vocab_size for offset in range(1, self.width + 1)]
            for token in wrong_tokens[:-1]:
                sibling = tree.add(token, parent)
                if level < self.depth:
                    tree.add(script[level], sibling)
            parent = tree.add(right if level < self.wrong_from else wrong_tokens[-1], parent)
        return tree.finish()


class RandomProposer:
    """Drafts random trees of ``nodes`` drafts; each token comes from the seeded generator, siblings are distinct.

    Args:
        vocab_size: ids are drawn below it.
        nodes: draft nodes of a tree, root not counted; fewer where the vocabulary has no distinct sibling left.
        seed: of the generator, which every ``start`` seeds anew.
        answer: if given, a child is the token that continues it with probability ``hit_rate``.
        hit_rate: see ``answer``.
    """

    def __init__(
        self, *, vocab_size: int, nodes: int, seed: int = 0, answer: Sequence[int] = (), hit_rate: float = 0.0
    ) -> None:
        self.vocab_size = vocab_size
        self.max_drafts = nodes
        self.seed = seed
        self.answer = list(answer)
        self.hit_rate = hit_rate
        self._random = np.random.default_rng(seed)
        self._committed = 0
        self._root = 0

    def start(self, prefill: Prefill) -> None:
        """Seeds the generator."""
        self._random = np.random.default_rng(self.seed)
        self._committed = 0

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Counts the tokens."""
        self._committed += len(tokens)
        self._root = int(tokens[-1])

    def propose(self) -> DraftTree:
        """A random recursive tree: every node hangs below one made before it."""
        tree = TreeBuilder(self._root)
        for row in range(1, self.max_drafts + 1):
            parent = int(self._random.integers(min(row, len(tree))))
            place = self._committed + tree.depths[parent]
            hit = place < len(self.answer) and self._random.random() < self.hit_rate
            token = self.answer[place] if hit else int(self._random.integers(self.vocab_size))
            if tree.row_of(token, parent) is None:
                tree.add(token, parent)
        return tree.finish()
