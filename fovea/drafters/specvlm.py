"""SpecVLM's drafter: EagleVLM over a context in which few rows stand for each picture (section 3.4 of its paper).

Legend: ``T`` tokens, ``L`` rows of the context, ``D`` hidden width, ``P`` pictures.

The target reads every visual token; only the drafter's context is compressed. What the question asks is the mean of the
target's states over the text between picture and answer: it is known when drafting begins, and the same while the
conversation goes on. Rows are numbered one after the other, so that rotary positions stay contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fovea.drafters.base import Context
from fovea.drafters.config import DraftRope
from fovea.drafters.eaglevlm import EagleVlmConfig, EagleVlmDrafter
from fovea.targets.base import Prefill, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.compression import CompressionConfig, VisualCompressor
from fovea.visual.pictures import pictures, questions

CompressedState = Literal["pooled", "none"]


@dataclass(frozen=True)
class SpecVlmConfig(EagleVlmConfig):
    """Numbers and switches of a SpecVLM drafter; the defaults are the paper's.

    Attributes:
        num_blocks, depth, feature_noise, draft_vocabulary, input_norm: as for EagleVLM.
        rope: ``1d`` alone, for a compressed row has no place among the target's positions.
        compression: how pictures are compressed.
        compressed_state: what a compressed row is fused with: the mean state of the tokens that it stands for
            (``pooled``), or nothing: then the row itself enters the block (``none``, as MSD has it).
    """

    rope: DraftRope = "1d"
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    compressed_state: CompressedState = "pooled"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice(compressed_state=CompressedState)
        if self.rope != "1d":
            raise ValueError(
                f"drafter.rope is {self.rope!r}, but a compressed row has no place among the target's positions; "
                "set drafter.rope=1d"
            )


class SpecVlmDrafter(EagleVlmDrafter):
    """The trainable part: fusion layer, blocks, compressor."""

    name = "specvlm"
    config_type = SpecVlmConfig

    def __init__(self, spec: TargetSpec, config: SpecVlmConfig, head: TargetHead) -> None:
        super().__init__(spec, config, head)
        self.compressor = VisualCompressor(spec, config.compression)

    def context(self, committed: Prefill, generator: torch.Generator | None = None) -> Context:
        """One row per text pair and what the compressor makes of each picture; drawn at random in training alone.

        Its notes are the visual tokens of each picture, the rows in their place, and the weight of each branch.
        """
        generator = generator if self.training else None
        pairs = super().context(committed, generator)
        is_visual = committed.is_visual.cpu().clone()
        # The first token has no pair.
        is_visual[:1] = False
        spans = [(start - 1, end - 1) for start, end in pictures(is_visual)]
        if not spans:
            return pairs
        asked = questions(is_visual, committed.answer_mask)
        means = torch.stack([committed.hidden[places.to(self.device)].to(self.dtype).mean(0) for places in asked])
        weights = self.compressor.weigh(means, generator)
        shown = [(pairs.embeds[start:end], pairs.states[start:end]) for start, end in spans]
        made = self.compressor(shown, weights, generator)

        rows = torch.ones(len(committed.ids) - 1, dtype=torch.int64)
        for (start, end), compressed in zip(spans, made, strict=True):
            rows[start:end] = 0
            rows[end - 1] = len(compressed.embeds)
        length = int(rows.sum())
        return replace(
            pairs,
            embeds=_in_place_of(spans, pairs.embeds, [compressed.embeds for compressed in made]),
            states=_in_place_of(spans, pairs.states, [compressed.states for compressed in made]),
            positions=torch.arange(1, length + 1, device=self.device)[None],
            is_visual=is_visual[1:].repeat_interleave(rows).to(self.device),
            place=rows.cumsum(0) - 1,
            next_position=length + 1,
            notes=self._notes([end - start for start, end in spans], [len(c.embeds) for c in made], weights),
        )

    def fuse(self, embeds: Tensor, states: Tensor, is_visual: Tensor | None) -> Tensor:
        """Fused rows [B, n, D]; those that stand for a picture as they are, if they have no state."""
        fused = super().fuse(embeds, states, is_visual)
        if is_visual is None or self.config.compressed_state == "pooled":
            return fused
        return torch.where(is_visual[..., None], embeds, fused)

    def _notes(self, tokens: list[int], rows: list[int], weights: Tensor) -> dict[str, Tensor]:
        notes = {"visual_tokens": torch.tensor(tokens).float(), "visual_rows": torch.tensor(rows).float()}
        if self.config.compression.gated:
            shares = weights.detach().float().cpu().unbind(1)
            names = (f"gate_{branch}" for branch in self.config.compression.branches)
            notes |= dict(zip(names, shares, strict=True))
        return notes


def _in_place_of(spans: list[tuple[int, int]], rows: Tensor, made: list[Tensor]) -> Tensor:
    """``rows`` [T - 1, D] with ``made`` in the place of each of ``spans``."""
    cuts = [0, *(cut for span in spans for cut in span), len(rows)]
    pieces = [rows[start:end] for start, end in pairwise(cuts)]
    pieces[1::2] = made
    return torch.cat(pieces)
