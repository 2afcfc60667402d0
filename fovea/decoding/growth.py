"""Growth of the draft tree by expected acceptance (EAGLE-2, sections 4.1 and 4.2).

Legend: ``f`` frontier nodes of a pass, ``w`` children per node, ``n`` rows of the finished tree.

Every pass expands the frontier, and the most probable children of the pass are the next frontier. In the end the most
probable of *all* children ever made are kept: a wide shallow tree where the drafter doubts, a deep narrow one where it
is sure. Host arithmetic on a few hundred numbers, so NumPy, and few calls of it: each costs more than its work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fovea.decoding.tree import DraftTree

#: ``expand(tokens [f], parents [f], depth) -> (ids [f, w], log_probs [f, w])``, see :func:`grow`.
Expand = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree.

    Attributes:
        width: children per expanded node, and nodes expanded per pass.
        depth: deepest depth that is expanded; the root has depth 0.
        nodes: nodes kept after the growth.
        count_root: whether the root is one of ``nodes``.
        levels: ``eagle`` expands depths 0..depth and so drafts up to depth + 1 tokens; ``strict`` expands depths
            0..depth - 1, so that no draft is deeper than ``depth``.
    """

    width: int = 6
    depth: int = 6
    nodes: int = 40
    count_root: bool = True
    levels: Literal["eagle", "strict"] = "eagle"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"tree width {self.width}: a node needs at least 1 child")
        if self.depth < 1:
            raise ValueError(f"tree depth {self.depth}: a tree needs at least depth 1")
        if self.levels not in ("eagle", "strict"):
            raise ValueError(
                f"tree levels {self.levels!r}: choose 'eagle' (depth + 1 levels) or 'strict' (depth levels)"
            )
        if self.max_drafts < self.depth:
            raise ValueError(
                f"a tree of {self.nodes} nodes holds {self.max_drafts} drafts, too few for depth {self.depth}: "
                "raise the number of nodes or lower the depth"
            )

    @property
    def passes(self) -> int:
        """Expansion passes, the root's included; also the depth of the deepest draft."""
        return self.depth + 1 if self.levels == "eagle" else self.depth

    @property
    def max_drafts(self) -> int:
        """Most draft nodes of a tree, root not counted."""
        return self.nodes - self.count_root


def grow(root_token: int, expand: Expand, config: TreeConfig) -> DraftTree:
    """The draft tree below ``root_token``.

    ``expand(tokens, parents, depth)`` is called once per pass. ``tokens`` [f] int64 are the frontier's tokens, and
    ``parents`` [f] int64 the row of each one's parent in the frontier of the pass before (-1 for the root). It returns
    ``ids`` [f, w] and ``log_probs`` [f, w], the children of each node by descending log-probability, equal values by
    lower id. Children of probability zero (-inf) are ignored.
    """
    return grow_passes(root_token, expand, width=config.width, passes=config.passes, max_drafts=config.max_drafts)


def grow_passes(root_token: int, expand: Expand, *, width: int, passes: int, max_drafts: int) -> DraftTree:
    """:func:`grow` in plain numbers: ``passes`` expansions of ``width`` nodes, ``max_drafts`` of the children kept."""
    tokens, parents, scores, depths = [np.array([root_token])], [np.array([-1])], [np.zeros(1)], [0]
    frontier_tokens, frontier_parents, frontier_scores = tokens[0], parents[0], scores[0]
    frontier_rows = np.zeros(1, dtype=np.int64)
    made = 1
    for depth in range(passes):
        ids, log_probs = expand(frontier_tokens, frontier_parents, depth)
        # Rounding may lift a log-probability above 0, and a child that outranks its parent could outlive it.
        child_scores = (np.minimum(log_probs, 0.0, dtype=np.float64) + frontier_scores[:, None]).ravel()
        child_tokens, branch = ids.ravel(), np.arange(child_scores.size) // ids.shape[1]
        if child_scores.min() == -np.inf:
            possible = child_scores > -np.inf
            child_tokens, branch, child_scores = child_tokens[possible], branch[possible], child_scores[possible]
            if not child_scores.size:
                break
        tokens.append(child_tokens)
        parents.append(frontier_rows[branch])
        scores.append(child_scores)
        depths.append(depth + 1)
        # A stable sort: among equals the child made first goes first.
        best = (-child_scores).argsort(kind="stable")[:width]
        frontier_tokens, frontier_parents, frontier_scores = child_tokens[best], branch[best], child_scores[best]
        frontier_rows = best + made
        made += child_scores.size
    depth_of_row = np.repeat(depths, [len(part) for part in tokens])
    grown = DraftTree(np.concatenate(tokens), np.concatenate(parents), depth_of_row, np.concatenate(scores))
    return _most_probable(grown, max_drafts)


def _most_probable(tree: DraftTree, max_drafts: int) -> DraftTree:
    """The root and the ``max_drafts`` best drafts, still in order of creation.

    A parent is never less probable than its child and was made earlier, so a stable sort that keeps a child keeps its
    parent.
    """
    if len(tree) <= max_drafts + 1:
        return tree
    kept = np.sort((-tree.log_probs).argsort(kind="stable")[: max_drafts + 1])
    row_of = np.empty(len(tree) + 1, dtype=np.int64)
    row_of[-1] = -1  # the root's parent, -1, stays what it is
    row_of[kept] = np.arange(kept.size)
    return DraftTree(tree.tokens[kept], row_of[tree.parents[kept]], tree.depths[kept], tree.log_probs[kept])
