"""Mid states: per supervised position, the output of the layer that attends most sharply (DREAM's mid features).

Legend: ``B`` conversations, ``T`` tokens, ``D`` hidden width, ``R`` supervised positions of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fovea.targets.attention import causal_attention_entropy

#: Which side of the chosen layer is the mid state: its output, or its input as in DREAM's code.
MidSide = Literal["output", "input"]


def default_mid_layers(num_layers: int) -> list[int]:
    """Layers 1 to floor(0.4 L) - 2, DREAM's range: 1..9 of 28, 1..10 of 32; at least layer 1."""
    return list(range(1, max(1, num_layers * 2 // 5 - 2) + 1))


def check_mid_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuses an empty list, repeated layers, and layers outside 1..``num_layers``."""
    if not layers or len(set(layers)) != len(layers) or not all(1 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"mid_layers={list(layers)} does not fit a target of {num_layers} layers; "
            f"give different layers from 1 to {num_layers}, such as {default_mid_layers(num_layers)}"
        )


class MidStateSelector:
    """Follows a forward pass layer by layer and keeps, per row, the state of the layer of least entropy so far.

    Layer i is the i-th of the stack, from 1; its output is transformers' ``hidden_states[i]``. Equal entropies go to
    the lower layer. Only rows and layers that were asked for are looked at.
    """

    def __init__(self, supervised_BT: Tensor, layers: Sequence[int], side: MidSide = "output") -> None:
        self.layers = frozenset(layers)
        self._supervised_BT = supervised_BT
        self._rows = [row.nonzero().squeeze(-1) for row in supervised_BT]
        self._take_input = side == "input"
        self._lowest_R: Tensor | None = None
        self._entropy_R: Tensor | None = None
        self._states_RD: Tensor | None = None

    def attention_probe(self, query_BHTE: Tensor, key_BKTE: Tensor, scale: float) -> None:
        """Measures the entropy of the layer that is running; the attention function calls it."""
        self._entropy_R = torch.cat(
            [
                causal_attention_entropy(query, key, scale, rows)
                for query, key, rows in zip(query_BHTE, key_BKTE, self._rows, strict=True)
            ]
        )

    def after_layer(self, before_BTD: Tensor, after_BTD: Tensor) -> None:
        """Takes the layer's input and output, once its attention has been probed."""
        assert self._entropy_R is not None
        states_RD = (before_BTD if self._take_input else after_BTD)[self._supervised_BT]
        if self._states_RD is None or self._lowest_R is None:
            self._lowest_R, self._states_RD = self._entropy_R, states_RD
            return
        sharper_R = self._entropy_R < self._lowest_R
        self._lowest_R = torch.where(sharper_R, self._entropy_R, self._lowest_R)
        self._states_RD = torch.where(sharper_R[:, None], states_RD, self._states_RD)

    def states(self) -> Tensor:
        """[R, D] the chosen states, conversation by conversation."""
        assert self._states_RD is not None
        return self._states_RD
