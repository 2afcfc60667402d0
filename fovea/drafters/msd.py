"""MSD's drafter (Multimodal Speculative Decoding): text and pictures enter by different ways.

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width.

At a text position the block reads the fusion of [embedding; state], as EAGLE's does. At an image position it reads the
projected visual token as it is: the fusion layer is left to language, and the target's states there are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.drafters.config import DraftRope
from fovea.drafters.eaglevlm import EagleVlmConfig, EagleVlmDrafter


@dataclass(frozen=True)
class MsdConfig(EagleVlmConfig):
    """Numbers and switches of an MSD drafter.

    Attributes:
        num_blocks, depth, feature_noise, input_norm: as of EagleVLM; MSD has the input norm for Qwen and not for LLaVA.
        rope: as for every drafter; MSD gives its drafter plain indices, for Qwen too.
    """

    rope: DraftRope = "1d"


class MsdDrafter(EagleVlmDrafter):
    """The trainable part: fusion layer of text positions, and blocks."""

    name = "msd"
    config_type = MsdConfig

    def fuse(self, embeds: Tensor, states: Tensor, is_visual: Tensor | None) -> Tensor:
        """The fusion of text rows, the visual tokens of image rows; draft nodes are text."""
        fused = super().fuse(embeds, states, None)
        return fused if is_visual is None else torch.where(is_visual[..., None], embeds, fused)
