"""The draft tree and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """Nodes in an order in which parents precede children; row 0 is the root, the last committed token.

    Attributes:
        tokens: [n] token ids, the root's included.
        parents: [n] row of the parent, -1 for the root.
        depths: [n] distance from the root.
        log_probs: [n] cumulative draft log-probability, 0 for the root.
        retrieval: cardinalities (K, min(K_raw, K_max)) of the nodes that retrieved evidence, for the trace.
        probes: how many of the last rows are no drafts. The target runs them like all others, but never accepts one;
            what it would choose behind each goes back to a proposer that observes. No draft hangs below a probe.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    retrieval: list[tuple[int, int]] = field(default_factory=list)
    probes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafts(self) -> DraftTree:
        """The tree without its probes: the root and all that may be accepted."""
        if not self.probes:
            return self
        rows = slice(len(self) - self.probes)
        columns = (self.tokens[rows], self.parents[rows], self.depths[rows], self.log_probs[rows])
        return DraftTree(*columns, retrieval=self.retrieval)

    def ancestor_mask(self) -> np.ndarray:
        """[n, n] bool: row i sees itself and its ancestors, the root among them."""
        # A row as the bits of one whole number: array calls per row would cost many times that.
        width = (len(self) + 7) // 8
        seen: list[int] = []
        for row, parent in enumerate(self.parents.tolist()):
            seen.append((seen[parent] if row else 0) | 1 << row)
        packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in seen), dtype=np.uint8)
        return np.unpackbits(packed.reshape(-1, width), axis=1, count=len(self), bitorder="little").view(bool)


class TreeBuilder:
    """A draft tree in the making, for proposers that know tokens and no probabilities."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self._rows: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def row_of(self, token: int, parent: int) -> int | None:
        """Row of the child of ``parent`` that carries ``token``, if there is one."""
        return self._rows.get((parent, token))

    def add(self, token: int, parent: int) -> int:
        """Adds a node below row ``parent``; its row."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        row = self._rows[parent, token] = len(self.tokens) - 1
        return row

    def add_path(self, tokens: Sequence[int], parent: int = 0) -> None:
        """Adds a chain below row ``parent``; where it runs along nodes that are there, it shares them."""
        for token in tokens:
            row = self.row_of(token, parent)
            parent = self.add(token, parent) if row is None else row

    def finish(self, probes: int = 0) -> DraftTree:
        """The tree, the last ``probes`` rows being no drafts.

        Without probabilities all drafts of a level count alike: the log-probability is minus the depth.
        """
        depths = np.array(self.depths)
        log_probs = -depths.astype(np.float64)
        return DraftTree(np.array(self.tokens), np.array(self.parents), depths, log_probs, probes=probes)
