"""Growth of the draft tree by expected acceptance (EAGLE-2, sections 4.1 and 4.2).

Legend: ``f`` frontier nodes of a pass, ``w`` children per node, ``n`` rows of the finished tree.

Every pass expands the frontier, and the most probable children of the pass are the next frontier. In the end the most
probable of *all* children ever made are kept: a wide shallow tree where the drafter doubts, a deep narrow one where it
is sure. A few hundred numbers, so plain lists: between two passes of a model, array calls cost more than their work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
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
    # Rows in order of creation, the root first. A cost is a negated log-probability: the best are the cheapest, and a
    # stable sort takes among equals the one made first.
    tokens, parents, depths, costs = [root_token], [-1], [0], [0.0]
    frontier, places = [0], [-1]
    ranked = [0]
    for depth in range(passes):
        ids, log_probs = expand(np.array([tokens[row] for row in frontier]), np.array(places), depth)
        made = len(tokens)
        for row, children, scores in zip(frontier, ids.tolist(), log_probs.tolist(), strict=True):
            cost = costs[row]
            # Rounding may lift a log-probability above 0, and a child that outranks its parent could outlive it.
            costs += [cost - score if score < 0 else cost for score in scores]
            tokens += children
            parents += [row] * len(children)
        depths += [depth + 1] * (len(tokens) - made)
        cheapest = sorted(range(made, len(tokens)), key=costs.__getitem__)
        ranked += cheapest[:max_drafts]
        frontier = [row for row in cheapest[:width] if costs[row] < inf]
        if not frontier:
            break
        places = [(row - made) // ids.shape[1] for row in frontier]
    # A parent never costs more than its child and was made earlier, so whoever keeps the child keeps the parent. What
    # is sorted pass by pass, the earlier passes first, is merged in a third of the comparisons.
    ranked.sort(key=costs.__getitem__)
    kept = sorted(row for row in ranked[: max_drafts + 1] if costs[row] < inf)
    row_of = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return DraftTree(
        tokens=np.array([tokens[row] for row in kept]),
        parents=np.array([row_of[parents[row]] for row in kept]),
        depths=np.array([depths[row] for row in kept]),
        log_probs=np.array([-costs[row] for row in kept]),
    )
