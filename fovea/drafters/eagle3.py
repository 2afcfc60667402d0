"""The EAGLE-3 drafter: states of a low, a middle and a high layer of the target, and a head of its own.

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width, ``k`` feature layers, ``W`` draft vocabulary.

The outputs of k layers are fused once into a state; below the root a state is the drafter's own output before its final
norm. Embedding and state enter the first block's attention side by side, each behind a norm of its own, and the state
alone is what the block adds to. No state of the target is imitated, so nothing ties the drafter's states to its head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fovea.drafters.base import Drafter, Scored, final_norm, initialise
from fovea.drafters.blocks import Attend, DecoderBlock
from fovea.drafters.config import DrafterConfig
from fovea.drafters.norm import RMSNorm
from fovea.drafters.rotary import Rotation
from fovea.targets.base import TargetSpec
from fovea.targets.feature_layers import check_feature_layers, default_feature_layers
from fovea.targets.head import TargetHead
from fovea.visual.memory import VisualMemory


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """Numbers and switches of an EAGLE-3 drafter.

    Attributes:
        num_blocks, depth, rope, feature_noise, draft_vocabulary: as for every drafter.
        feature_layers: layers whose outputs are read; None for 2, L // 2 and L - 3 of L.
    """

    draft_vocabulary: int | None = 32_000
    feature_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_layers is not None and not self.feature_layers:
            raise ValueError("drafter.feature_layers is empty; name the layers to read, or null for the paper's")

    def layers_read(self, spec: TargetSpec) -> tuple[int, ...]:
        """The layers that are named, or the paper's.

        Raises:
            ValueError: the target has no such layers.
        """
        layers = default_feature_layers(spec.num_layers) if self.feature_layers is None else self.feature_layers
        check_feature_layers(layers, spec.num_layers)
        return layers


class Eagle3Drafter(Drafter):
    """The trainable part: fusion of the layers, norm of the embedding, blocks, final norm, head.

    The head starts as the target's rows of the draft vocabulary, when that has been chosen.
    """

    name = "eagle3"
    config_type = Eagle3Config

    def __init__(self, spec: TargetSpec, config: Eagle3Config, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        width = spec.hidden_size
        self.fc = nn.Linear(len(self.feature_layers) * width, width, bias=False)
        self.embed_norm = RMSNorm(width, eps=spec.rms_norm_eps)
        self.blocks = nn.ModuleList(
            DecoderBlock(spec, layer, beside=0 if layer else width) for layer in range(config.num_blocks)
        )
        self.norm = final_norm(spec, head)
        self.lm_head = nn.Linear(width, config.draft_vocabulary or spec.vocab_size, bias=False)
        initialise(self)
        if self.token_ids is None:
            self._copy_head()

    @property
    def own_head(self) -> Tensor:
        """[W, D] the drafter's own head."""
        return self.lm_head.weight

    def choose_vocabulary(self, counts: Tensor) -> None:
        """As for every drafter; the head starts as the target's rows of the tokens that were chosen."""
        super().choose_vocabulary(counts)
        self._copy_head()

    def inject(self, states: Tensor) -> Tensor:
        """The fusion [..., D] of the outputs [..., k D] of the feature layers."""
        return self.fc(states.to(self.dtype))

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
        x = mid = first(states, rotation, attend, beside=self.embed_norm(embeds))
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """The head reads the normed outputs ``h`` [R, D], children read them as they are."""
        hat = self.norm(h)
        return Scored(hat, hat, h)

    @torch.no_grad()
    def _copy_head(self) -> None:
        self.lm_head.weight.copy_(self.head_rows)
