"""The Proposer contract: whatever drafts, neural or not, takes this seat in the decoding loop."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fovea.decoding.tree import DraftTree
from fovea.targets.base import Prefill


class Proposer(Protocol):
    """Drafts a tree per round for one request at a time; ``start`` begins a request and forgets the last one."""

    #: Most draft nodes of a tree, root not counted: the loop reserves that many pending rows.
    max_drafts: int

    def start(self, prefill: Prefill) -> None:
        """Takes the prompt. The first token follows by :meth:`commit`, with the state of the last prompt token."""
        ...

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Takes newly committed ``tokens`` [k] and the target's states f [k, D] that predicted them.

        ``states[i]`` is the state of the token *before* ``tokens[i]``, so a pair is one input of a drafter that reads
        (embedding of token t + 1, state at t). The last token is the root of the next tree.
        """
        ...

    def propose(self) -> DraftTree:
        """The draft tree below the last committed token. The committed caches stay as they are."""
        ...
