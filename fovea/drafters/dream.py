"""DREAM's drafter: the text alone as input, the target's states by cross-attention, fewer visual tokens.

Legend: ``B`` batch, ``n`` rows, ``T`` tokens, ``N`` visual tokens, ``D`` hidden width.

A row reads the embedding of token t + 1 alone. The states at positions up to t are keys and values of the block behind
the first one; below the root of a tree those are the drafter's own, and a node sees its ancestors' only, there as in
self-attention (the published code sets no tree mask in its cross-attention, so that branches leak). That block's output
imitates the mid states.

Structure and figures are those of the published code; the paper's text fuses [embedding; state] and counts fewer
parameters. The first token of a text has no state before it, and so no row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fovea.drafters.base import Context, Drafter, Scored, final_norm, initialise
from fovea.drafters.blocks import Attend, CrossAttentionBlock, DecoderBlock
from fovea.drafters.config import DrafterConfig, DraftRope
from fovea.drafters.rotary import Rotation
from fovea.targets.base import Prefill, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.budget import restricted
from fovea.visual.memory import VisualMemory
from fovea.visual.prefix import most_important


@dataclass(frozen=True)
class DreamConfig(DrafterConfig):
    """Numbers of a DREAM drafter; the defaults are the published ones.

    Attributes:
        num_blocks: decoder blocks; the first one is before the cross-attention block, the others are behind it.
        depth, feature_noise: as for every drafter.
        rope: as for every drafter; the published code counts the drafter's own rows.
        visual_keep: share of each picture's visual tokens that stay, in (0, 1]: those that the target's last layer
            attends to most.
    """

    num_blocks: int = 2
    rope: DraftRope = "1d"
    feature_noise: float = 0.2
    visual_keep: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.visual_keep <= 1:
            raise ValueError(f"drafter.visual_keep is {self.visual_keep}; a share lies in (0, 1]")


class DreamDrafter(Drafter):
    """The trainable part: block, cross-attention block, block, final norm. The head is the target's."""

    name = "dream"
    config_type = DreamConfig
    states_leave = True

    def __init__(self, spec: TargetSpec, config: DreamConfig, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        self.blocks = nn.ModuleList(
            DecoderBlock(spec, layer, input_norm=layer > 0) for layer in range(config.num_blocks)
        )
        self.cross = CrossAttentionBlock(spec, config.num_blocks)
        self.norm = final_norm(spec, head)
        initialise(self)

    @property
    def cache_layers(self) -> int:
        """The blocks' and, as the last one, the cross-attention's."""
        return self.config.num_blocks + 1

    def context(self, committed: Prefill, generator: torch.Generator | None = None) -> Context:
        """One row per pair of the text that is left: of each picture the tokens that matter most to the target.

        A token that is left out takes its state along, so the state beside an embedding is that of the token before
        it among those that stay.

        Raises:
            ValueError: tokens must be left out and nothing says which.
        """
        if self.config.visual_keep == 1 or not committed.is_visual.any():
            return super().context(committed, generator)
        if committed.importance is None:
            raise ValueError(
                f"drafter.visual_keep is {self.config.visual_keep}, and how much the target attends to its visual "
                "tokens is not known: these artifacts or this target do not give it. Export the artifacts again, or "
                "set drafter.visual_keep=1"
            )
        kept = most_important(committed.importance(), committed.is_visual, self.config.visual_keep)
        context = super().context(restricted(committed, kept, states_leave=self.states_leave), generator)
        behind = context.next_position if self.config.rope == "1d" else int(committed.positions.max()) + 1
        rows_so_far = kept.cpu().cumsum(0) - 2
        return replace(context, place=rows_so_far[1:].clamp(min=-1), next_position=behind)

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
        """As for every drafter; mid is the output of the cross-attention block."""
        first, *deeper = self.blocks
        x = mid = self.cross(first(embeds, rotation, attend), states, attend)
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """The normed block outputs, which children read too."""
        normed = self.norm(h)
        return Scored(normed, normed, normed)
