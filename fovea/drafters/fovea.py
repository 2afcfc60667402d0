"""The FOVEA drafter: backbone blocks over committed states, corrected by evidence where a node is scored.

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width, ``N`` visual tokens.

Its committed states are the target's; below the root they are ``RMSNorm(h)`` of the parent, without the correction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fovea.drafters.base import Context, Drafter, Scored, final_norm, initialise
from fovea.drafters.blocks import Attend, CrossAttentionBlock, DecoderBlock
from fovea.drafters.config import DrafterConfig
from fovea.drafters.rotary import Rotation
from fovea.targets.base import Prefill, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.correction import EvidenceCorrection
from fovea.visual.memory import VisualMemory
from fovea.visual.prefix import VisualPrefix, kept_in_prefix
from fovea.visual.retrieval import RetrievalConfig

FeatureInjection = Literal["fc", "cross_attention", "none"]
Recursion = Literal["raw", "corrected"]
Interface = Literal["fovea", "fixed_prefix", "dynamic_insertion", "correction_rebuild"]


@dataclass(frozen=True)
class FoveaConfig(DrafterConfig):
    """Numbers and switches of a FOVEA drafter; the defaults are the paper's for 7B targets.

    Attributes:
        num_blocks, depth, rope: as for every drafter; the depth embedding has D + 1 rows.
        max_correction_depth: deepest depth that is corrected; -1 for none.
        correction_width: width of the two correction perceptrons.
        retrieval: how a node selects evidence.
        feature_injection: how states enter: ``fc`` fuses [embedding; state] (EAGLE), ``cross_attention`` adds DREAM's
            block behind the first one, ``none`` leaves them out.
        recursion: whether a node hands its children its state without (``raw``) or with the correction.
        visual_prefix: image positions that stay in the drafter's context.
        visual_prefix_ratio: share that ``topk`` keeps, in (0, 1].
        interface: how evidence is shown, see :mod:`fovea.drafters.interfaces`. ``fixed_prefix`` trains without a
            correction; the other three train alike, since what they retrieve must be learned, and decode differently.
        use_gate: whether the correction is gated.
        use_depth_embedding: whether queries depend on the depth.
    """

    num_blocks: int = 2
    max_correction_depth: int = 1
    correction_width: int = 512
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    feature_injection: FeatureInjection = "fc"
    recursion: Recursion = "raw"
    visual_prefix: VisualPrefix = "full"
    visual_prefix_ratio: float = 0.25
    interface: Interface = "fovea"
    use_gate: bool = True
    use_depth_embedding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("correction_width")
        if not -1 <= self.max_correction_depth <= self.depth:
            raise ValueError(
                f"drafter.max_correction_depth is {self.max_correction_depth}; "
                f"choose -1 (never) to drafter.depth = {self.depth}"
            )
        if not 0 < self.visual_prefix_ratio <= 1:
            raise ValueError(f"drafter.visual_prefix_ratio is {self.visual_prefix_ratio}; a share lies in (0, 1]")
        self._require_choice(
            feature_injection=FeatureInjection,
            recursion=Recursion,
            visual_prefix=VisualPrefix,
            interface=Interface,
        )
        if self.interface == "dynamic_insertion" and (self.visual_prefix != "full" or self.max_correction_depth < 0):
            raise ValueError(
                "drafter.interface=dynamic_insertion chooses the context's visual tokens by what the root retrieves: "
                "it takes drafter.visual_prefix=full and drafter.max_correction_depth of 0 or more"
            )

    @property
    def corrects(self) -> bool:
        """Whether any node is ever corrected in training."""
        return self.max_correction_depth >= 0 and self.interface != "fixed_prefix"


class FoveaDrafter(Drafter):
    """The trainable part: fusion layer, blocks, final norm, correction. The head is the target's and stays outside."""

    name = "fovea"
    config_type = FoveaConfig

    def __init__(self, spec: TargetSpec, config: FoveaConfig, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        width, injection = spec.hidden_size, config.feature_injection
        self.fc = nn.Linear(2 * width, width) if injection == "fc" else None
        self.blocks = nn.ModuleList(DecoderBlock(spec, layer) for layer in range(config.num_blocks))
        self.cross = CrossAttentionBlock(spec, config.num_blocks) if injection == "cross_attention" else None
        self.norm = final_norm(spec, head)
        self.correction = EvidenceCorrection(
            width,
            config.correction_width,
            depths=config.depth + 1,
            max_depth=config.max_correction_depth,
            config=config.retrieval,
            use_gate=config.use_gate,
            use_depth_embedding=config.use_depth_embedding,
        )
        initialise(self, skip=("correction.shift",))
        if self.correction.depth_embedding is not None:
            nn.init.normal_(self.correction.depth_embedding, std=0.02)
        if not config.corrects:
            self.correction.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def cache_layers(self) -> int:
        """Layers of a key-value cache for this drafter."""
        return len(self.blocks) + (self.cross is not None)

    def context(self, committed: Prefill, generator: torch.Generator | None = None) -> Context:
        """One row per pair, image positions as ``visual_prefix`` has them; the rows that stay keep their positions."""
        context, config = super().context(committed, generator), self.config
        if config.visual_prefix == "full":
            return context
        ratio = config.visual_prefix_ratio
        kept = kept_in_prefix(committed.visual, committed.is_visual, config.visual_prefix, ratio)[1:]
        (rows,) = kept.nonzero(as_tuple=True)
        return replace(
            context,
            embeds=context.embeds[rows],
            states=context.states[rows],
            positions=context.positions[:, rows],
            is_visual=context.is_visual[rows],
            place=kept.cpu().cumsum(0) - 1,
        )

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
        """As for every drafter; mid is the output of the first block, DREAM's block included if there is one."""
        x = embeds if self.fc is None else self.fc(torch.cat((embeds, states), dim=-1))
        first, *deeper = self.blocks
        x = first(x, rotation, attend)
        if self.cross is not None:
            x = self.cross(x, states, attend)
        mid = x
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    @property
    def reproducible_config(self) -> FoveaConfig:
        """The config with the rule in the place of draws at random."""
        config = self.config
        if config.retrieval.mode != "random":
            return config
        return replace(config, retrieval=replace(config.retrieval, mode="mass"))

    def remember(self, visual: Tensor, generator: torch.Generator | None = None) -> VisualMemory | None:
        """Memory of the visual tokens [N, D] of a request; None where no correction will ever happen."""
        if not self.config.corrects or visual.shape[0] == 0:
            return None
        return self.correction.remember(visual.to(self.dtype), generator=generator)

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """Scores block outputs ``h`` [R, D]; ``root`` is the selection of each row's root, for ``once_per_block``."""
        raw = self.norm(h)
        if memory is None or depth > self.config.max_correction_depth:
            return Scored(raw, raw, raw, None)
        corrected, retrieved = self.correction(h, depth, memory, root)
        hat = self.norm(corrected)
        return Scored(hat, raw, hat if self.config.recursion == "corrected" else raw, retrieved)
