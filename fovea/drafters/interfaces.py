"""The four ways of the paper's Table 3 in which a drafter may be shown visual evidence, as one switch.

``fovea`` corrects what a node is scored by and never touches the cache. The other three are what it is compared to:
``fixed_prefix`` has the pictures in the context and nothing else; ``correction_rebuild`` corrects as FOVEA does, and
computes the cache of the committed text anew for every tree; ``dynamic_insertion`` keeps in the context those visual
tokens alone that the root of the tree retrieves, which takes a new cache each time, and corrects nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fovea.decoding.growth import TreeConfig
from fovea.drafters.base import Context, Drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.targets.base import Prefill
from fovea.visual.memory import VisualMemory

_REBUILDING = ("correction_rebuild", "dynamic_insertion")


def proposer_for(drafter: Drafter, tree: TreeConfig) -> NeuralProposer:
    """The proposer that drafts with ``drafter`` as the ``interface`` of its config has it."""
    interface = getattr(drafter.config, "interface", "fovea")
    if interface in _REBUILDING:
        return RebuildingProposer(drafter, tree, insert=interface == "dynamic_insertion")
    return NeuralProposer(drafter, tree)


class RebuildingProposer(NeuralProposer):
    """Computes the cache of all committed text anew before every tree.

    Args:
        drafter: a :class:`fovea.drafters.fovea.FoveaDrafter`.
        tree: its shape.
        insert: rebuild it around the visual tokens that the root retrieves, and score without a correction.
    """

    def __init__(self, drafter: Drafter, tree: TreeConfig, *, insert: bool) -> None:
        super().__init__(drafter, tree)
        self._insert = insert

    def start(self, prefill: Prefill) -> None:
        self._committed: list[tuple[Tensor, Tensor]] = []
        super().start(prefill)
        self._source: VisualMemory | None = None
        if self._insert:
            # Nodes are scored without it; it only says what the context holds.
            self._source, self.memory = self.memory, None

    def _read(self, context: Context) -> None:
        self._context = context
        super()._read(context)

    def _run_committed(self) -> Tensor:
        self._committed += self._pairs
        context, retrieved = self._context, None
        if self._source is not None and len(self._source):
            drafter: Any = self.drafter
            root = super()._run_committed()
            retrieved = drafter.correction.retrieve(root[0], 0, self._source)
            context = _holding(context, retrieved.selected[0])
        self.cache.clear()
        NeuralProposer._read(self, context)
        self._next_position = context.next_position
        self._pairs = list(self._committed)
        root = super()._run_committed()
        if retrieved is not None:
            self.evidence.append(retrieved)
        return root


def _holding(context: Context, selected: Tensor) -> Context:
    """``context`` with those of its visual rows that are ``selected`` [N] bool of all visual tokens."""
    kept = ~context.is_visual
    # A prompt that begins with a picture has no row for its first token, which no pair embeds.
    rows = int(context.is_visual.sum())
    kept[context.is_visual] = selected[len(selected) - rows :]
    (index,) = torch.nonzero(kept, as_tuple=True)
    return replace(
        context,
        embeds=context.embeds[index],
        states=context.states[index],
        positions=context.positions[:, index],
        is_visual=context.is_visual[index],
    )
