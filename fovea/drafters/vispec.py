"""ViSpec's drafter: a picture as a few compressed rows, and one vector of it for all text behind it.

Legend: ``B`` batch, ``n`` rows, ``T`` tokens, ``N`` visual tokens of a picture, ``m`` queries, ``D`` hidden width,
``Q`` heads, ``E`` head width.

An adaptor with m learned queries reads each picture. The first m - 1 outputs take the picture's place in the context,
at the positions of its last tokens, and enter the block as they are. The last output is the picture's *global vector*:
every later text token joins it with the state beside it, until another picture comes; before the first picture, and
without any, it is zero. Pictures side by side, with no text between them, are read as one, as in the published code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.drafters.base import Context, Drafter, Scored, initialise
from fovea.drafters.blocks import Attend, DecoderBlock
from fovea.drafters.config import DrafterConfig, DraftRope
from fovea.drafters.rotary import Rotation
from fovea.targets.base import Prefill, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.memory import VisualMemory
from fovea.visual.pictures import pictures


@dataclass(frozen=True)
class ViSpecConfig(DrafterConfig):
    """Numbers and switches of a ViSpec drafter; the defaults are the published ones.

    Attributes:
        num_blocks, depth, feature_noise: as for every drafter.
        rope: as for every drafter; the published code gives its drafter plain token indices, for Qwen too.
        num_queries: m, at least 2.
        multi_head: a key-value head for each query head, as published; false groups them as the target does.
    """

    rope: DraftRope = "1d"
    feature_noise: float = 0.2
    num_queries: int = 2
    multi_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_queries < 2:
            raise ValueError(
                f"drafter.num_queries is {self.num_queries}; one makes the global vector and others, at least one, the "
                "rows that stand for the picture"
            )


class ImageAdaptor(nn.Module):
    """Attention of m learned queries to one picture, without order and mask."""

    def __init__(self, spec: TargetSpec, num_queries: int) -> None:
        super().__init__()
        width = spec.num_heads * spec.head_dim
        self.queries = nn.Parameter(torch.randn(num_queries, spec.num_heads, spec.head_dim) * spec.head_dim**-0.5)
        self.kv_proj = nn.Linear(spec.hidden_size, 2 * width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(width, spec.hidden_size, bias=False)

    def forward(self, visual: Tensor) -> Tensor:
        """Outputs [m, D] for the visual tokens [N, D] of a picture."""
        count, heads, head_dim = self.queries.shape
        keys, values = self.kv_proj(visual).view(-1, 2, heads, head_dim).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(self.queries.transpose(0, 1)[None], keys[None], values[None])[0]
        return self.o_proj(mixed.transpose(0, 1).reshape(count, heads * head_dim))


class ViSpecDrafter(Drafter):
    """The trainable part: adaptor, the two fusion layers and blocks; a node's output is a target state as it stands."""

    name = "vispec"
    config_type = ViSpecConfig

    def __init__(self, spec: TargetSpec, config: ViSpecConfig, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        width = spec.hidden_size
        own = replace(spec, num_kv_heads=self.num_kv_heads)
        self.adaptor = ImageAdaptor(spec, config.num_queries)
        self.img_fc = nn.Linear(2 * width, width)
        self.fc = nn.Linear(2 * width, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(own, layer, input_norm=layer > 0) for layer in range(config.num_blocks)
        )
        initialise(self, skip=("img_fc",))
        # It starts as if there were no pictures.
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.eye(width, 2 * width))
            nn.init.zeros_(self.img_fc.bias)

    @property
    def num_kv_heads(self) -> int:
        """As many as query heads where ``multi_head`` says so."""
        return self.spec.num_heads if self.config.multi_head else self.spec.num_kv_heads

    def context(self, committed: Prefill, generator: torch.Generator | None = None) -> Context:
        """One row per pair of text, and m - 1 for each picture (fewer if it has fewer tokens)."""
        context = super().context(committed, generator)
        embeds = committed.embeds.to(self.dtype)
        kept = ~committed.is_visual
        behind = torch.zeros(len(kept), dtype=torch.int64)
        found, rows = [embeds.new_zeros(embeds.shape[1])], embeds.clone()
        for start, end in pictures(committed.is_visual):
            *compressed, of_all = self.adaptor(embeds[start:end]).to(embeds.dtype)
            compressed = compressed[: end - start]
            rows[end - len(compressed) : end] = torch.stack(compressed)
            kept[end - len(compressed) : end] = True
            behind[end:] = len(found)
            found.append(of_all)
        carried = torch.stack(found)[behind.to(embeds.device)]
        (chosen,) = kept[1:].nonzero(as_tuple=True)
        return replace(
            context,
            embeds=rows[1:][chosen],
            states=context.states[chosen],
            positions=context.positions[:, chosen],
            is_visual=context.is_visual[chosen],
            place=kept[1:].cpu().cumsum(0) - 1,
            carried=carried[1:][chosen],
            carried_next=found[-1],
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
        """As for every drafter; ``carried`` are the global vectors, and mid is the output of the first block."""
        assert carried is not None
        seeing = self.img_fc(torch.cat((states, carried), dim=-1))
        x = self.fc(torch.cat((embeds, seeing), dim=-1))
        if is_visual is not None:
            x = torch.where(is_visual[..., None], embeds, x)
        first, *deeper = self.blocks
        x = mid = first(x, rotation, attend)
        for block in deeper:
            x = block(x, rotation, attend)
        return x, mid

    def score(self, h: Tensor, depth: int, memory: VisualMemory | None, root: Tensor | None = None) -> Scored:
        """The block outputs ``h`` [R, D] themselves, at every depth."""
        return Scored(h, h, h)
