"""The draft tree and its growth."""

from __future__ import annotations

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
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    retrieval: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def ancestor_mask(self) -> np.ndarray:
        """[n, n] bool: row i sees itself and its ancestors, the root among them."""
        mask = np.eye(len(self), dtype=bool)
        for row in range(1, len(self)):
            mask[row] |= mask[self.parents[row]]
        return mask
