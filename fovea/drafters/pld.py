"""Prompt lookup decoding (PLD, Saxena 2023): what followed the last few tokens when they occurred before is the draft.

The longest n-gram that ends the text is looked for first, and its earliest occurrence wins. Nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from fovea.decoding.tree import DraftTree, TreeBuilder
from fovea.drafters.readable_text import BARRIER, readable, readable_prompt
from fovea.targets.base import Prefill, TargetSpec


@dataclass(frozen=True)
class PLDConfig:
    """How PLD searches.

    Attributes:
        max_ngram: longest n-gram that is looked for; then shorter ones, down to a single token.
        draft_tokens: tokens of a draft.
        continuation: which occurrences count. ``before_tail``: all ``draft_tokens`` tokens behind it lie before the
            n-gram that ends the text. ``in_text``: they start before it and may run into it (the public code).
            ``cut``: fewer will do, the draft ends where the text does (transformers).
    """

    max_ngram: int = 3
    draft_tokens: int = 10
    continuation: Literal["before_tail", "in_text", "cut"] = "before_tail"

    def __post_init__(self) -> None:
        for name in ("max_ngram", "draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def most_tokens_per_round(self) -> int:
        """All drafts and the target's own token."""
        return self.draft_tokens + 1


class PLDProposer:
    """Drafts a chain that is copied from the text of the request."""

    def __init__(self, spec: TargetSpec, config: PLDConfig) -> None:
        self.config = config
        self.max_drafts = config.draft_tokens
        self._placeholder_ids = frozenset(spec.placeholder_ids)
        self._text = np.empty(0, dtype=np.int64)
        self._length = 0

    def start(self, prefill: Prefill) -> None:
        """Takes the prompt as the text so far."""
        self._text = np.empty(prefill.capacity, dtype=np.int64)
        self._length = 0
        self._append(readable_prompt(prefill, self._placeholder_ids))

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        """Appends ``tokens`` to the text; the states are of no use here."""
        ids = tokens.tolist()
        self._root = ids[-1]
        self._append(readable(ids, self._placeholder_ids))

    def propose(self) -> DraftTree:
        """The copied continuation, or the root alone if there is none."""
        tree = TreeBuilder(self._root)
        tree.add_path(find_continuation(self._text[: self._length], self.config))
        return tree.finish()

    def _append(self, ids: list[int]) -> None:
        self._text[self._length : self._length + len(ids)] = ids
        self._length += len(ids)


def find_continuation(text: np.ndarray, config: PLDConfig) -> list[int]:
    """The tokens to draft behind ``text`` [T]; no n-gram and no draft holds a :data:`BARRIER`. Empty if none is found.

    A draft that would run into a barrier counts only under ``cut``, up to there.
    """
    length, wanted = len(text), config.draft_tokens
    # starts[n - 1]: where drafts would begin, behind the occurrences of the last n tokens. An occurrence of n + 1
    # tokens is one of n tokens with the right token before it.
    starts: list[np.ndarray] = []
    places = np.arange(1, length)
    for size in range(1, min(config.max_ngram, length - 1) + 1):
        token = text[length - size]
        if token == BARRIER:
            break
        places = places[places >= size]
        places = places[text[places - size] == token]
        starts.append(places)
    for size in range(len(starts), 0, -1):
        last = {
            "before_tail": length - size - wanted,
            "in_text": min(length - size - 1, length - wanted),
            "cut": length - 1,
        }[config.continuation]
        candidates = starts[size - 1]
        for start in candidates[candidates <= last].tolist():
            draft = text[start : start + wanted].tolist()
            if BARRIER in draft:
                draft = draft[: draft.index(BARRIER)] if config.continuation == "cut" else []
            if draft:
                return draft
    return []
