"""Qwen2.5-VL: what is its own, the vision inputs and the three-axis rotary positions (M-RoPE).

A text token advances all three axes (time, row, column) by one. An image of r x c visual tokens stands at one time,
its tokens count rows and columns from there, and the text behind it continues at the largest of the three: an image
takes r * c cache slots and only max(r, c) positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel, Qwen2_5_VLForConditionalGeneration

from fovea.targets.base import Encoded, TargetSpec, View
from fovea.targets.encoding import Grid, ReadImages
from fovea.targets.hf import HFTarget
from fovea.targets.spec import decoder_spec


class Qwen25VL(HFTarget):
    """Qwen2.5-VL behind the Target contract."""

    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = AutoProcessor

    def __init__(self, model: PreTrainedModel, processor: Any, spec: TargetSpec) -> None:
        config: Any = model.config
        self.image_token = processor.image_token
        self.image_token_id = config.image_token_id
        self._merge_size = config.vision_config.spatial_merge_size
        self._inner: Any = model.model
        super().__init__(model, processor, spec)

    @staticmethod
    def read_spec(config: Any, eos_ids: tuple[int, ...]) -> TargetSpec:
        """The spec of a checkpoint; everything around a picture is a placeholder too."""
        placeholders = (
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        )
        return decoder_spec(config, config.text_config, eos_ids, placeholder_ids=placeholders)

    def read_images(self, images: Sequence[Image.Image]) -> ReadImages:
        """``pixel_values`` and ``image_grid_thw`` of the image processor; one grid of merged patches per image."""
        read = self.processor.image_processor(images=list(images), return_tensors="pt")
        patches = read["image_grid_thw"]
        grids = tuple((rows, columns) for _, rows, columns in (patches // self._merge_size).tolist())
        vision = {"pixel_values": read["pixel_values"], "image_grid_thw": patches}
        return ReadImages(vision, grids, tuple(map(View, range(len(images)))))

    def visual_tokens(self, vision: Mapping[str, Tensor]) -> Tensor:
        """[N, D] merged patches of all images, each in reading order."""
        features = self._inner.get_image_features(vision["pixel_values"], vision["image_grid_thw"])
        return torch.cat(features.pooler_output).to(self.dtype)

    def rotary_positions(self, is_visual_T: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, int]:
        """[3, T] M-RoPE positions, computed from the grids; see the module's docstring."""
        parts: list[Tensor] = []
        position = slot = 0
        starts = _image_starts(is_visual_T, grids)
        for start, (rows, columns) in zip(starts, grids, strict=True):
            parts.append(_text_positions(position, start - slot))
            position += start - slot
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            parts.append(torch.stack([torch.zeros_like(row), row, column]).flatten(1) + position)
            position += max(rows, columns)
            slot = start + rows * columns
        rest = is_visual_T.shape[0] - slot
        return torch.cat([*parts, _text_positions(position, rest)], dim=1), position + rest

    def generation_inputs(self, batch: Sequence[Encoded], is_visual_BT: Tensor) -> dict[str, Tensor]:
        """Pictures, and the token types without which transformers falls back to one-axis positions."""
        inputs = super().generation_inputs(batch, is_visual_BT)
        return inputs | {"mm_token_type_ids": is_visual_BT.to(torch.int32)} if inputs else {}


def _text_positions(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def _image_starts(is_visual_T: Tensor, grids: Sequence[Grid]) -> list[int]:
    """First slot of each image; two images may stand side by side, so they are told apart by their sizes."""
    slots = is_visual_T.nonzero().squeeze(-1).tolist()
    starts, taken = [], 0
    for rows, columns in grids:
        starts.append(slots[taken])
        taken += rows * columns
    return starts
