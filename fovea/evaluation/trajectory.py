"""What happened in every round of one answer: the draft tree, what the target said to it, and the evidence behind it.

Traces hold numbers of rounds alone. A trajectory is collected beside them, from an answer that is decoded once more, so
that nothing of it is in any measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fovea.decoding.proposer import FeatureReader, Observer, Proposer, Remembering
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.tree import DraftTree
from fovea.targets.base import Encoded, Prefill, Target
from fovea.visual.retrieval import Retrieved


@dataclass(frozen=True)
class TrajectoryRound:
    """One draft-verify iteration.

    Attributes:
        position: tokens of the answer before this round; the root of the tree is the last of them.
        tree: what was drafted, without probes.
        evidence: tree row -> [N] retrieval weight of each memory entry, 0 where not selected; of the rows that
            retrieved evidence to score their children.
        choices: [n] the target's most probable token behind every row of the tree.
        accepted: rows of the accepted drafts, from the root down.
        committed: tokens committed, bonus included.
    """

    position: int
    tree: DraftTree
    evidence: dict[int, np.ndarray]
    choices: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: int = 0

    @property
    def has_probabilities(self) -> bool:
        """Whether the tree's log-probabilities are the drafter's; without them they are minus the depths."""
        return not np.array_equal(self.tree.log_probs, -self.tree.depths)


@dataclass(frozen=True)
class Trajectory:
    """One answer: its trace, and its rounds."""

    trace: GenerationTrace
    rounds: list[TrajectoryRound]


def collect_trajectory(
    target: Target,
    proposer: Proposer,
    encoded: Encoded,
    *,
    max_new_tokens: int,
    selection: Selection = GREEDY,
    method: str = "speculative",
    source: str = "",
) -> Trajectory:
    """Answers ``encoded`` once more and keeps every round.

    A proposer that remembers earlier requests forgets them first: this answer is among them.
    """
    if isinstance(proposer, Remembering):
        proposer.forget()
    watching = _Watching(proposer)
    limits = {"max_new_tokens": max_new_tokens, "selection": selection}
    trace = generate(target, watching, encoded, method=method, source=source, **limits)
    return Trajectory(trace, watching.rounds)


class _Watching:
    """Takes notes beside a proposer."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.max_drafts = proposer.max_drafts
        self.feature_layers = proposer.feature_layers if isinstance(proposer, FeatureReader) else ()
        self.rounds: list[TrajectoryRound] = []
        self._tokens = 0

    def start(self, prefill: Prefill) -> None:
        self.proposer.start(prefill)

    def propose(self) -> DraftTree:
        tree = self.proposer.propose()
        retrieved = getattr(self.proposer, "evidence", [])
        self.rounds.append(TrajectoryRound(self._tokens, tree.drafts, _evidence_by_row(tree.drafts, retrieved)))
        return tree

    def observe(self, choices: Sequence[int]) -> None:
        if isinstance(self.proposer, Observer):
            self.proposer.observe(choices)
        self.rounds[-1].choices.extend(choices[: len(self.rounds[-1].tree)])

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self.proposer.commit(tokens, states)
        if self.rounds:
            last = self.rounds[-1]
            accepted = accepted_rows(last.tree, tokens.tolist())
            self.rounds[-1] = TrajectoryRound(
                last.position, last.tree, last.evidence, last.choices, accepted, len(tokens)
            )
        self._tokens += len(tokens)


def accepted_rows(tree: DraftTree, committed: Sequence[int]) -> list[int]:
    """Rows of the drafts among the ``committed`` tokens of a round, from the root down."""
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    child = {edge: row for row, edge in enumerate(edges)}
    rows = [0]
    for token in committed:
        if (row := child.get((rows[-1], token))) is None:
            break
        rows.append(row)
    return rows[1:]


def _evidence_by_row(tree: DraftTree, retrieved: Sequence[Retrieved]) -> dict[int, np.ndarray]:
    """Weights [N] by tree row, of what the nodes of each pass ``retrieved``, the root's pass first.

    A pass expands the most probable nodes of its depth, in the order of their probability, and what the finished tree
    keeps of a depth is its most probable nodes too; so both lists begin alike.
    """
    found = {}
    for depth, pass_ in enumerate(retrieved):
        rows = np.flatnonzero(tree.depths == depth)
        rows = rows[np.argsort(-tree.log_probs[rows], kind="stable")]
        weights = pass_.alpha.detach().to(torch.float32).cpu().numpy()
        found |= {int(row): own for row, own in zip(rows, weights, strict=False)}
    return found
