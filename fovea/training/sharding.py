"""FSDP2 under Lightning: weights, gradients and optimizer states of a drafter cut into one part per rank.

Each decoder block is a group of its own, and all other parameters are one more, whole from the beginning of a training
step to the end of its backward pass. A block is gathered whenever it is called, by all ranks together. But a rank calls
its blocks once per unrolled step, and no more steps than its own answers are long; so it goes on, with one row of
nothing, until all ranks have called them as often as there can be steps.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from fovea.drafters.base import Drafter
from fovea.drafters.blocks import CrossAttentionBlock, DecoderBlock

#: What is gathered by itself.
BLOCKS = (DecoderBlock, CrossAttentionBlock)
#: Methods of the training module behind which all of its parameters are whole.
STEPS = ("training_step", "validation_step")


class ShardedStrategy(ModelParallelStrategy):
    """Shards a :class:`fovea.training.module.DrafterModule` over all ranks.

    A checkpoint is one file with whole weights and optimizer states, as without sharding.

    Args:
        reshard_after_forward: give a block's weights back behind each call, and gather them anew for the backward pass;
            off keeps them from the first call on, for less traffic and more memory.
        settings: of Lightning's strategy.
    """

    def __init__(self, *, reshard_after_forward: bool = True, **settings: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **settings)
        self.reshard_after_forward = reshard_after_forward
        self._calls: BlockCalls | None = None

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_processes * self.num_nodes, 1
        super().setup_environment()

    def shard(self, module: L.LightningModule, drafter: Drafter) -> None:
        """Shards ``module`` and its ``drafter`` in place; once is enough."""
        if self._calls is None:
            mesh = self.device_mesh["data_parallel"]
            self._calls = shard(module, drafter, mesh, reshard_after_forward=self.reshard_after_forward)

    def idle(self, calls: int) -> Tensor:
        """Zero, behind ``calls`` calls of the drafter in all; once per training or validation step."""
        assert self._calls is not None
        return self._calls.catch_up(calls)


class BlockCalls:
    """Counts how often a drafter was called since the last :meth:`catch_up`."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.made = 0
        drafter.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.made += 1

    def catch_up(self, calls: int) -> Tensor:
        """Zero, with a gradient of zero for the blocks, behind so many calls in all; counts from 0 again."""
        drafter = self.drafter
        device, width = drafter.device, drafter.spec.hidden_size
        zero = torch.zeros((), device=device)
        while self.made < calls:
            row = torch.zeros(1, 1, width, device=device, dtype=drafter.dtype)
            rotation = drafter.rotary.text(0, 1, drafter.dtype, device)
            h, mid = drafter(row, row, rotation, lambda layer, queries, keys, values: queries, carried=row)
            zero = zero + 0 * (h.float().sum() + mid.float().sum())
        self.made = 0
        return zero


def shard(module: nn.Module, drafter: Drafter, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> BlockCalls:
    """Shards the parameters of ``drafter``, a part of ``module``, over ``mesh``; returns the count of its calls."""
    for part in drafter.modules():
        if isinstance(part, BLOCKS):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh)
    for name in STEPS:
        register_fsdp_forward_method(module, name)
    return BlockCalls(drafter)
