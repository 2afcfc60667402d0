"""The FOVEA drafter: backbone blocks over committed states, corrected by evidence where a node is scored.

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width, ``N`` visual tokens, ``V`` vocabulary.

One row reads the pair (embedding of token t + 1, state at t) at the rotary position of token t + 1, and predicts the
state at t + 1 and with it token t + 2. On the committed prefix the states are the target's; below the root they are the
drafter's own, ``RMSNorm(h)`` of the parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fovea.drafters.blocks import Attend, CrossAttentionBlock, DecoderBlock
from fovea.drafters.norm import RMSNorm
from fovea.drafters.rotary import Rotary, Rotation
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.correction import EvidenceCorrection
from fovea.visual.memory import VisualMemory
from fovea.visual.prefix import VisualPrefix
from fovea.visual.retrieval import RetrievalConfig, Retrieved

FeatureInjection = Literal["fc", "cross_attention", "none"]
Recursion = Literal["raw", "corrected"]
DraftRope = Literal["target", "1d"]


@dataclass(frozen=True)
class FoveaConfig:
    """Numbers and switches of a FOVEA drafter; the defaults are the paper's for 7B targets.

    Attributes:
        num_blocks: decoder blocks of the target's kind.
        depth: D, deepest tree depth that is expanded; the depth embedding has D + 1 rows.
        max_correction_depth: deepest depth that is corrected; -1 for none.
        correction_width: width of the two correction perceptrons.
        retrieval: how a node selects evidence.
        feature_injection: how states enter: ``fc`` fuses [embedding; state] (EAGLE), ``cross_attention`` adds DREAM's
            block behind the first one, ``none`` leaves them out.
        recursion: whether a node hands its children its state without (``raw``) or with the correction.
        visual_prefix: image positions that stay in the drafter's context.
        visual_prefix_ratio: share that ``topk`` keeps, in (0, 1].
        use_gate: whether the correction is gated.
        use_depth_embedding: whether queries depend on the depth.
        rope: ``target`` for the target's rotary positions, ``1d`` for plain token indices.
    """

    num_blocks: int = 2
    depth: int = 6
    max_correction_depth: int = 1
    correction_width: int = 512
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    feature_injection: FeatureInjection = "fc"
    recursion: Recursion = "raw"
    visual_prefix: VisualPrefix = "full"
    visual_prefix_ratio: float = 0.25
    use_gate: bool = True
    use_depth_embedding: bool = True
    rope: DraftRope = "target"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "depth", "correction_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter.{name} is {getattr(self, name)}; it must be 1 or more")
        if not -1 <= self.max_correction_depth <= self.depth:
            raise ValueError(
                f"drafter.max_correction_depth is {self.max_correction_depth}; "
                f"choose -1 (never) to drafter.depth = {self.depth}"
            )
        if not 0 < self.visual_prefix_ratio <= 1:
            raise ValueError(f"drafter.visual_prefix_ratio is {self.visual_prefix_ratio}; a share lies in (0, 1]")
        for name, choices in (
            ("feature_injection", FeatureInjection),
            ("recursion", Recursion),
            ("visual_prefix", VisualPrefix),
            ("rope", DraftRope),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"drafter.{name} is {getattr(self, name)!r}; choose from {get_args(choices)}")


class Scored(NamedTuple):
    """Draft nodes after the final norm.

    Attributes:
        hat: [R, D] LM-head inputs, corrected where the correction is on.
        raw: [R, D] the same without correction.
        passed_on: [R, D] the states that children read.
        retrieved: the evidence, if the correction is on.
    """

    hat: Tensor
    raw: Tensor
    passed_on: Tensor
    retrieved: Retrieved | None


class FoveaDrafter(nn.Module):
    """The trainable part: fusion layer, blocks, final norm, correction. The head is the target's and stays outside."""

    name = "fovea"
    config_type = FoveaConfig

    def __init__(self, spec: TargetSpec, config: FoveaConfig, head: TargetHead) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.head = head
        width, injection = spec.hidden_size, config.feature_injection
        self.fc = nn.Linear(2 * width, width) if injection == "fc" else None
        self.blocks = nn.ModuleList(DecoderBlock(spec, layer) for layer in range(config.num_blocks))
        self.cross = CrossAttentionBlock(spec, config.num_blocks) if injection == "cross_attention" else None
        self.norm = RMSNorm(width, eps=spec.rms_norm_eps)
        self.correction = EvidenceCorrection(
            width,
            config.correction_width,
            depths=config.depth + 1,
            max_depth=config.max_correction_depth,
            config=config.retrieval,
            use_gate=config.use_gate,
            use_depth_embedding=config.use_depth_embedding,
        )
        self.rotary = Rotary(spec.rope if config.rope == "target" else RopeSpec(spec.rope.theta), spec.head_dim)
        self._initialise()

    def _initialise(self) -> None:
        """Matrices by fan-in, outputs into the residual stream smaller the more of them; the norm is the target's."""
        residual = (2 * len(self.blocks)) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("correction.shift"):
                scale = residual if name.endswith(("o_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.correction.depth_embedding is not None:
            nn.init.normal_(self.correction.depth_embedding, std=0.02)
        with torch.no_grad():
            self.norm.weight.copy_(self.head.norm_weight)
        if self.config.max_correction_depth < 0:
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

    def embed(self, ids: Tensor) -> Tensor:
        """The target's input embeddings [..., D], in the drafter's dtype."""
        return self.head.embed(ids).to(self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., V] of normed states, by the target's LM head."""
        return self.head.logits(states.to(self.head.lm_head_weight.dtype))

    def draft_positions(self, positions: Tensor) -> Tensor:
        """Rotary positions [A, ...] that the drafter gives tokens at the target's ``positions`` [A, ..., T]."""
        if self.config.rope == "target":
            return positions
        return torch.arange(positions.shape[-1], device=positions.device).expand_as(positions[:1])

    def forward(self, embeds: Tensor, states: Tensor, rotation: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        """Block outputs of pairs: h [B, n, D] before the final norm, and the mid states [B, n, D].

        Args:
            embeds: [B, n, D] embeddings of the tokens t + 1.
            states: [B, n, D] states at t.
            rotation: rotations [n, 1, E] or [B, n, 1, E] of the tokens t + 1.
            attend: what rows see, see :data:`fovea.drafters.blocks.Attend`.

        The mid state is the output of the first block, DREAM's block included if there is one.
        """
        x = embeds if self.fc is None else self.fc(torch.cat((embeds, states), dim=-1))
        first, *deeper = self.blocks
        x = first(x, rotation, attend)
        if self.cross is not None:
            x = self.cross(x, states, attend)
        mid = x
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    def remember(self, visual: Tensor, generator: torch.Generator | None = None) -> VisualMemory | None:
        """Memory of the visual tokens [N, D] of a request; None where no correction will ever happen."""
        if self.config.max_correction_depth < 0 or visual.shape[0] == 0:
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

    def trainable_parameters(self) -> dict[str, int]:
        """Trainable parameters of each part, and ``total``."""
        counts = {
            name: count
            for name, part in self.named_children()
            if (count := sum(p.numel() for p in part.parameters() if p.requires_grad))
        }
        return {**counts, "total": sum(counts.values())}
