"""Qwen2.5-VL's architecture in miniature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from fovea.targets.tiny.architecture import Architecture, built
from fovea.targets.tiny.batches import Block, PictureReader
from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.drawing import CELL
from fovea.targets.tiny.tokenizer import (
    CHAT_TEMPLATE,
    IMAGE_PAD,
    SPECIAL_TOKENS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)

_MEAN = np.asarray(OPENAI_CLIP_MEAN, dtype=np.float32)
_STD = np.asarray(OPENAI_CLIP_STD, dtype=np.float32)
_PATCH = CELL // 2


class Qwen25VL(Architecture):
    """A cell of a picture is one visual token: two by two patches of 14 pixels, merged."""

    special_tokens = SPECIAL_TOKENS
    template = CHAT_TEMPLATE
    pictures = "grids"
    alphabet = ((3, 40), (3, 40), (8, 6))

    def new_model(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int) -> Any:
        """See :meth:`Architecture.new_model`."""
        ids = tokenizer.get_vocab()
        rope = {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "mrope_section": list(config.mrope_section),
        }
        vision = {
            "depth": config.vision_depth,
            "hidden_size": config.vision_hidden_size,
            "intermediate_size": config.vision_intermediate_size,
            "num_heads": config.vision_heads,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [config.vision_depth - 1],
            "out_hidden_size": config.hidden_size,
        }
        whole = Qwen2_5_VLConfig(
            text_config=self.text_fields(config, tokenizer, layers) | {"rope_parameters": rope},
            vision_config=vision,
            image_token_id=ids[IMAGE_PAD],
            video_token_id=ids[VIDEO_PAD],
            vision_start_token_id=ids[VISION_START],
            vision_end_token_id=ids[VISION_END],
            tie_word_embeddings=True,
        )
        model = built(Qwen2_5_VLForConditionalGeneration, whole)
        _look_back(model)
        return model

    def processor(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLProcessor:
        """The processor; pictures keep their size from 4 to ``config.max_visual_tokens`` visual tokens."""
        bounds: dict[str, Any] = {"min_pixels": 4 * CELL**2, "max_pixels": config.max_visual_tokens * CELL**2}
        return Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(**bounds),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(**bounds),
            chat_template=tokenizer.chat_template,
        )

    def reader(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PictureReader:
        """See :meth:`Architecture.reader`."""
        return _Reader()

    def eyes(self, model: Any) -> list[nn.Module]:
        """The vision tower, its merger included."""
        return [model.model.visual]

    def cells(self, model: Any, pictures: Sequence[Image.Image]) -> Tensor:
        """See :meth:`Architecture.cells`."""
        tower = model.model.visual
        patches = {name: value.to(tower.device) for name, value in patches_of(pictures).items()}
        return tower(patches["pixel_values"], patches["image_grid_thw"]).pooler_output


class _Reader(PictureReader):
    """M-RoPE: the cells of a picture stand at one time and count rows and columns."""

    before, token, after = VISION_START, IMAGE_PAD, VISION_END
    axes = 3

    def block(self, image: Image.Image) -> Block:
        rows, columns = image.height // CELL, image.width // CELL
        return Block([(0, y, x) for y in range(rows) for x in range(columns)], max(rows, columns))

    def vision(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        return patches_of(images)


def patches_of(images: Iterable[Image.Image]) -> dict[str, Tensor]:
    """What Qwen2.5-VL's image processor makes of pictures that need no resizing, in a fraction of the time."""
    pixels, grids = [], []
    for image in images:
        scaled = (np.asarray(image, dtype=np.float32) / 255 - _MEAN) / _STD
        rows, columns = image.height // CELL, image.width // CELL
        cells = scaled.reshape(rows, 2, _PATCH, columns, 2, _PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        flat = cells.reshape(rows * columns * 4, 3, 1, _PATCH * _PATCH)
        pixels.append(np.broadcast_to(flat, (len(flat), 3, 2, _PATCH * _PATCH)).reshape(len(flat), -1))
        grids.append((1, 2 * rows, 2 * columns))
    return {"pixel_values": torch.from_numpy(np.concatenate(pixels)), "image_grid_thw": torch.tensor(grids)}


@torch.no_grad()
def _look_back(model: Any, strength: float = 1.5) -> None:
    """Biases the heads of the first layer towards the tokens one, two, ... places back.

    Copying rests on heads that know the token before; started this way, a short training finds them.
    """
    text = model.model.language_model
    attention, frequencies = text.layers[0].self_attn, text.rotary_emb.inv_freq
    key = torch.cat([torch.ones_like(frequencies), torch.zeros_like(frequencies)])
    attention.k_proj.bias.copy_(strength * key.repeat(text.config.num_key_value_heads))
    for head, bias in enumerate(attention.q_proj.bias.view(text.config.num_attention_heads, -1)):
        angles = (head + 1) * frequencies
        bias.copy_(strength * torch.cat([angles.cos(), -angles.sin()]))
