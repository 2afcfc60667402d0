"""The Proposer contract: whatever drafts, neural or not, takes this seat in the decoding loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from fovea.decoding.tree import DraftTree
from fovea.targets.base import Prefill


class Proposer(Protocol):
    """Drafts a tree per round for one request at a time; ``start`` begins a request and forgets the last one."""

    #: Most rows of a tree, probes included and root not counted: the loop reserves that many pending rows.
    max_drafts: int

    def start(self, prefill: Prefill) -> None:
        """Takes the prompt. The first token follows by :meth:`commit`, with the state of the last prompt token."""
        ...

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Takes newly committed ``tokens`` [k] and the target's states f [k, D] that predicted them.

        A :class:`FeatureReader` gets the outputs of its layers instead.

        ``states[i]`` is the state of the token *before* ``tokens[i]``, so a pair is one input of a drafter that reads
        (embedding of token t + 1, state at t). The last token is the root of the next tree, if the answer goes on: the
        tokens that end an answer are handed over too.
        """
        ...

    def propose(self) -> DraftTree:
        """The draft tree below the last committed token. The committed caches stay as they are."""
        ...


@runtime_checkable
class FeatureReader(Protocol):
    """A proposer that reads outputs of some of the target's layers wherever others read its states f."""

    #: See :mod:`fovea.targets.feature_layers`; empty for f.
    feature_layers: tuple[int, ...]


@runtime_checkable
class Observer(Protocol):
    """A proposer that learns from the target's choices, those behind the probes of its tree among them."""

    def observe(self, choices: Sequence[int]) -> None:
        """Takes the target's most probable token behind every row of the last tree; ``commit`` follows.

        The loop counts this call as bookkeeping, so it only keeps what it is given: work belongs into ``propose``.
        """
        ...


@runtime_checkable
class Noting(Protocol):
    """A proposer that has figures of a request to put into its trace."""

    @property
    def notes(self) -> Mapping[str, float]:
        """Figures by name, complete behind ``start``; those of several requests add up."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that drafts from what it saw in earlier requests."""

    def forget(self) -> None:
        """Forgets all earlier requests, so that a warm-up leaves nothing behind."""
        ...


@runtime_checkable
class Recalling(Remembering, Protocol):
    """One whose memory can be made again from answers alone."""

    def recall(self, answer: Sequence[int]) -> None:
        """Remembers an ``answer`` as if it had been decoded, for an evaluation that goes on behind a finished part."""
        ...
