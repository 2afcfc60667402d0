"""EAGLE-2's drafter for vision-language models (EagleVLM, the baseline of SpecVLM, its section 3.3).

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width.

One fusion layer and one block; a node's output is a target state as it stands: the shared LM head reads it, and its
children read it. There is no final norm, for the states that it imitates are behind the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fovea.drafters.base import Drafter, Scored, initialise
from fovea.drafters.blocks import Attend, DecoderBlock
from fovea.drafters.config import DrafterConfig
from fovea.drafters.rotary import Rotation
from fovea.targets.base import TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.memory import VisualMemory


@dataclass(frozen=True)
class EagleVlmConfig(DrafterConfig):
    """Numbers and switches of an EagleVLM drafter.

    Attributes:
        num_blocks, depth, rope, feature_noise: as for every drafter.
        input_norm: whether the first block normalises its input. EAGLE leaves that out; EagleVLM restores it, for
            states of visual tokens are large enough to overflow without.
    """

    feature_noise: float = 0.2
    input_norm: bool = True


class EagleVlmDrafter(Drafter):
    """The trainable part: fusion layer and blocks."""

    name = "eaglevlm"
    config_type = EagleVlmConfig

    def __init__(self, spec: TargetSpec, config: EagleVlmConfig, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size)
        self.blocks = nn.ModuleList(
            DecoderBlock(spec, layer, input_norm=config.input_norm or layer > 0) for layer in range(config.num_blocks)
        )
        initialise(self)

    def fuse(self, embeds: Tensor, states: Tensor, is_visual: Tensor | None) -> Tensor:
        """What the first block reads [B, n, D] of the rows' embeddings and states."""
        del is_visual
        return self.fc(torch.cat((embeds, states), dim=-1))

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        is_visual: Tensor | None = None,
        carried: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As for every drafter; mid is the output of the first block."""
        first, *deeper = self.blocks
        x = mid = first(self.fuse(embeds, states, is_visual), rotation, attend)
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """The block outputs ``h`` [R, D] themselves, at every depth."""
        return Scored(h, h, h)
