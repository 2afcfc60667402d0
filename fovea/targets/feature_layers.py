"""Feature layers: the outputs of a few decoder layers that a drafter reads in the place of the last states (EAGLE-3).

Legend: ``B`` batch, ``T`` tokens, ``D`` hidden width, ``k`` layers.

Layer i is the i-th of the stack, from 1; its output is transformers' ``hidden_states[i]``, what layer i + 1 reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's: a low, a middle and a high one, 2, L // 2 and L - 3; those that differ where there are few layers."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(1, layer), num_layers) for layer in wanted}))


def check_feature_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuses repeated layers, and layers outside 1..``num_layers``."""
    if len(set(layers)) != len(layers) or not all(1 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"feature_layers={list(layers)} does not fit a target of {num_layers} layers; "
            f"give different layers from 1 to {num_layers}, such as {list(default_feature_layers(num_layers))}"
        )


class FeatureTap:
    """Follows a forward pass layer by layer and keeps the outputs of ``layers``."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._outputs: dict[int, Tensor] = {}

    def after_layer(self, number: int, output_BTD: Tensor) -> None:
        """Takes the output of layer ``number`` if it is one of them."""
        if number in self._layers:
            self._outputs[number] = output_BTD

    def states(self) -> Tensor:
        """[B, T, k D] the outputs side by side, in the order of the layers."""
        return torch.cat([self._outputs[layer] for layer in self._layers], dim=-1)


def tap(layers: Sequence[int], num_layers: int) -> FeatureTap | None:
    """A tap on ``layers``; None for none, which costs nothing.

    Raises:
        ValueError: the target has no such layers.
    """
    if not layers:
        return None
    check_feature_layers(layers, num_layers)
    return FeatureTap(layers)
