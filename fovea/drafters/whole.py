"""The weights of a drafter whose training has cut them into parts, or keeps exact ones behind a rounded copy.

All ranks must ask together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fovea.drafters.base import Drafter


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of ``module``; of tensors of which each rank holds a part (FSDP2), the whole ones."""
    state: dict[str, Any] = module.state_dict()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def exact_state(module: nn.Module) -> dict[str, Tensor]:
    """:func:`whole_state` in float32 where DeepSpeed trains that, and computes with a copy in half precision."""
    state = whole_state(module)
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "_hp_mapping"):  # DeepSpeed's; None where another rank has the part
            state[name] = parameter.get_full_hp_param()  # pyright: ignore[reportAttributeAccessIssue]
    return state


@torch.no_grad()
def whole_drafter(drafter: Drafter) -> Drafter:
    """``drafter``, or where each rank holds a part of it, a copy that is whole and on its device."""
    if not any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
        return drafter
    copy = type(drafter)(drafter.spec, drafter.config, drafter.head).to(drafter.device, drafter.dtype)
    copy.load_state_dict(whole_state(drafter))
    return copy.train(drafter.training)
