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
    # Rows in order of creation, the root first. A cost is a negated log-probability, so that sorting needs no copy.
    tokens, parents, costs = [np.array([root_token])], [np.array([-1])], [np.zeros(1)]
    rows_made = [1]
    frontier_tokens, frontier_parents = tokens[0], parents[0]
    frontier_rows, frontier_costs = np.zeros(1, dtype=np.int64), costs[0]
    for depth in range(passes):
        ids, log_probs = expand(frontier_tokens, frontier_parents, depth)
        parent_costs = frontier_costs[:, None]
        # Rounding may lift a log-probability above 0, and a child that outranks its parent could outlive it.
        child_costs = np.maximum(parent_costs - log_probs, parent_costs).ravel()
        child_tokens = ids.ravel()
        tokens.append(child_tokens)
        parents.append(frontier_rows.repeat(ids.shape[1]))
        costs.append(child_costs)
        # A stable sort: among equals the child made first goes first. Impossible children come last.
        best = child_costs.argsort(kind="stable")[:width]
        frontier_costs = child_costs[best]
        if frontier_costs[-1] == np.inf:
            best = best[frontier_costs < np.inf]
            frontier_costs = child_costs[best]
        frontier_tokens, frontier_parents = child_tokens[best], best // ids.shape[1]
        frontier_rows = best + sum(rows_made)
        rows_made.append(child_tokens.size)
        if not best.size:
            break
    return _most_probable(
        np.concatenate(tokens),
        np.concatenate(parents),
        np.repeat(np.arange(len(rows_made)), rows_made),
        np.concatenate(costs),
        max_drafts,
    )


def _most_probable(
    tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, costs: np.ndarray, max_drafts: int
) -> DraftTree:
    """The tree of the root and the ``max_drafts`` cheapest drafts of possible ones, still in order of creation.

    A parent never costs more than its child and was made earlier, so a stable sort that keeps a child keeps its parent.
    """
    kept = costs.argsort(kind="stable")[: max_drafts + 1]
    kept.sort()
    kept_costs = costs[kept]
    if kept_costs.max() == np.inf:
        kept = kept[kept_costs < np.inf]
        kept_costs = costs[kept]
    row_of = np.empty(tokens.size, dtype=np.int64)
    row_of[kept] = np.arange(kept.size)
    new_parents = row_of[parents[kept]]
    new_parents[0] = -1
    return DraftTree(tokens[kept], new_parents, depths[kept], -kept_costs)
