"""Lookahead with a trie (Zhao et al. 2024, sections 4.2 and 4.3): tokens that followed the last few before, as a tree.

Two tries count n-grams. One holds the prompt of the request and goes with it; the other holds answers, those of earlier
requests too. What stands below the last tokens of the text in both is the draft tree, the most frequent nodes first.
Nothing is learned.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.drafters.readable_text import BARRIER, readable, readable_prompt
from fovea.targets.base import Prefill, TargetSpec

#: Weights of prompt and answers in the order of nodes; in the first, answers decide between equals of the prompt.
_PROMPT_FIRST = (1.0 - 1e-4, 1e-4)
_ANSWERS = (0.0, 1.0)


@dataclass(frozen=True)
class TrieConfig:
    """What the tries hold and how much of it is drafted.

    Attributes:
        decoding_length: most nodes of a draft tree, the root counted. Where more match, the first half is kept for the
            most frequent continuations in answers.
        branch_length: deepest draft.
        prefix: most tokens at the end of the text that are looked up. Fewer are tried, down to one, while the tree has
            fewer than ``branch_length`` nodes.
        isolate: forget the answers of earlier requests.
        max_nodes: of the trie of answers. Beyond, between two requests, counts are halved and what was seen once goes.
    """

    decoding_length: int = 64
    branch_length: int = 12
    prefix: int = 2
    isolate: bool = False
    max_nodes: int = 65_536

    def __post_init__(self) -> None:
        for name, least in (("decoding_length", 2), ("branch_length", 1), ("prefix", 1), ("max_nodes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def most_tokens_per_round(self) -> int:
        """A whole branch and the target's own token."""
        return min(self.branch_length, self.decoding_length - 1) + 1


class TrieNode:
    """The n-gram that leads here: how often it occurred, and what followed it."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, TrieNode] = {}


class NgramTrie:
    """Counts of all n-grams of up to ``length`` tokens in the texts that were put in; none runs across a barrier."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.root = TrieNode()
        self.size = 0
        # The nodes of all n-grams that end where the text does, the shortest first.
        self._open: list[TrieNode] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Goes on with the text."""
        for token in tokens:
            if token == BARRIER:
                self._open = []
                continue
            self._open = [self._child(node, token) for node in (self.root, *self._open[: self.length - 1])]

    def end_text(self) -> None:
        """What comes next is another text."""
        self._open = []

    def find(self, tokens: Sequence[int]) -> TrieNode | None:
        """The node of the n-gram ``tokens``, if it occurred."""
        node = self.root
        for token in tokens:
            found = node.children.get(token)
            if found is None:
                return None
            node = found
        return node

    def shrink(self, max_nodes: int) -> None:
        """Halves all counts and drops what is left without one, until at most ``max_nodes`` are left."""
        self.end_text()
        while self.size > max_nodes:
            self.size = _halve(self.root)

    def _child(self, node: TrieNode, token: int) -> TrieNode:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = TrieNode()
            self.size += 1
        child.count += 1
        return child


class TrieLookahead:
    """Drafts trees of what followed the last tokens before."""

    def __init__(self, spec: TargetSpec, config: TrieConfig) -> None:
        self.config = config
        self.max_drafts = config.decoding_length - 1
        self._placeholder_ids = frozenset(spec.placeholder_ids)
        self.forget()

    def forget(self) -> None:
        """Forgets all earlier requests."""
        self._answers = self._empty_trie()

    def recall(self, answer: Sequence[int]) -> None:
        """Takes in the tokens of an earlier answer, as its request would have."""
        if self.config.isolate:
            return
        self._answers.shrink(self.config.max_nodes)
        self._answers.extend(readable(list(answer), self._placeholder_ids))

    def start(self, prefill: Prefill) -> None:
        """Takes in the prompt, and lets go of the last one."""
        if self.config.isolate:
            self.forget()
        self._answers.shrink(self.config.max_nodes)
        prompt = readable_prompt(prefill, self._placeholder_ids)
        self._prompt = self._empty_trie()
        self._prompt.extend(prompt)
        self._tail = prompt[-self.config.prefix :]

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Takes in ``tokens``; the states are of no use here."""
        ids = tokens.tolist()
        self._root = ids[-1]
        ids = readable(ids, self._placeholder_ids)
        self._answers.extend(ids)
        self._tail = (self._tail + ids)[-self.config.prefix :]

    def propose(self) -> DraftTree:
        """What both tries hold below the last tokens; the root alone if they hold nothing."""
        tree = TreeBuilder(self._root)
        for size in range(min(self.config.prefix, len(self._tail)), 0, -1):
            # A barrier is in no trie. Whatever follows more tokens also follows fewer, so the later tree has it too.
            tail = self._tail[-size:]
            found = draw_tree(self._root, self._prompt.find(tail), self._answers.find(tail), self.config)
            tree = found if len(found) > 1 else tree
            if len(tree) >= self.config.branch_length:
                break
        return tree.finish()

    def _empty_trie(self) -> NgramTrie:
        """Of n-grams long enough for a whole branch below all tokens that are looked up."""
        return NgramTrie(self.config.prefix + self.config.branch_length)


def draw_tree(root: int, in_prompt: TrieNode | None, in_answers: TrieNode | None, config: TrieConfig) -> TreeBuilder:
    """The tree below ``root`` of what both nodes have below them, at most ``decoding_length`` nodes of it.

    Half of them are the most frequent ones in answers, the others those that come first when the prompt decides.
    """
    tree = TreeBuilder(root)
    pair = (in_prompt or _NOTHING, in_answers or _NOTHING)
    _add_most_frequent(tree, pair, _ANSWERS, max(1, config.decoding_length // 2), config.branch_length)
    _add_most_frequent(tree, pair, _PROMPT_FIRST, config.decoding_length, config.branch_length)
    return tree


_Pair = tuple[TrieNode, TrieNode]


def _add_most_frequent(tree: TreeBuilder, pair: _Pair, weights: tuple[float, float], nodes: int, depth: int) -> None:
    """Lets ``tree`` grow to ``nodes`` nodes by the weightiest of those that are not in it yet.

    No n-gram occurs more often than its beginning, so whoever takes the weightiest child that hangs below the tree so
    far takes the weightiest of all; among equals the one that was seen first.
    """
    # A heap of (weight, number of the offer), and the offers: parent's row, token, nodes of the n-gram.
    waiting: list[tuple[float, int]] = []
    offers: list[tuple[int, int, _Pair]] = []

    def offer_children(row: int, pair: _Pair) -> None:
        in_prompt, in_answers = pair
        for token in in_prompt.children | in_answers.children:
            below = (in_prompt.children.get(token, _NOTHING), in_answers.children.get(token, _NOTHING))
            weight = weights[0] * below[0].count + weights[1] * below[1].count
            if weight > 0:
                heapq.heappush(waiting, (-weight, len(offers)))
                offers.append((row, token, below))

    offer_children(0, pair)
    while waiting and len(tree) < nodes:
        parent, token, below = offers[heapq.heappop(waiting)[1]]
        row = tree.row_of(token, parent)
        row = tree.add(token, parent) if row is None else row
        if tree.depths[row] < depth:
            offer_children(row, below)


_NOTHING = TrieNode()


def _halve(node: TrieNode) -> int:
    """Halves the counts below ``node`` and drops children without one; the number of nodes that are left there."""
    for child in node.children.values():
        child.count //= 2
    node.children = {token: child for token, child in node.children.items() if child.count}
    return len(node.children) + sum(map(_halve, node.children.values()))
