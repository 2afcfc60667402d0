"""Verification of a draft tree: the path that the target takes itself, as far as it was drafted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from fovea.decoding.stopping import cut
from fovea.decoding.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round.

    Attributes:
        accepted_nodes: tree rows on the walk below the root, before any cut.
        bonus: the target's choice behind the last of them.
        committed: tokens of the walk and the bonus, cut after an end token or at the cap; never empty.
        finish: ``eos``, ``cap``, or empty while the answer goes on.
    """

    accepted_nodes: list[int]
    bonus: int
    committed: list[int]
    finish: str

    @property
    def rows(self) -> list[int]:
        """Tree rows whose target states chose the ``committed`` tokens: the root and all accepted nodes but a cut off
        tail. They are what enters the cache: the last committed token is not in it yet, it is the next root.
        """
        return [0, *self.accepted_nodes][: len(self.committed)]

    @property
    def accepted(self) -> int:
        """Draft tokens among ``committed``."""
        return min(len(self.accepted_nodes), len(self.committed))


def verify(tree: DraftTree, choose: Callable[[int], int], eos_ids: Collection[int], remaining: int) -> Verdict:
    """Walks from the root to the child that carries the target's choice, as long as there is one.

    ``choose(row)`` is the token that the target chooses behind tree row ``row``; it is asked once per row of the walk,
    from the root down, so it may depend on what it chose before. ``remaining`` >= 1 tokens may still be committed.
    Siblings carry distinct tokens.
    """
    tokens = tree.tokens.tolist()
    child = {edge: row for row, edge in enumerate(zip(tree.parents.tolist(), tokens, strict=True))}
    accepted: list[int] = []
    choice = choose(0)
    while row := child.get((accepted[-1] if accepted else 0, choice)):
        accepted.append(row)
        choice = choose(row)
    committed, finish = cut([*(tokens[node] for node in accepted), choice], eos_ids, remaining)
    return Verdict(accepted, choice, committed, finish)
