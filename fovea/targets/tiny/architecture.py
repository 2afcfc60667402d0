"""The model: Qwen2.5-VL's architecture in miniature, and how a shallow one grows deep."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.drawing import CELL
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START


def model_config(config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int) -> Qwen2_5_VLConfig:
    """Configuration of a target with ``layers`` text layers."""
    ids = tokenizer.get_vocab()
    text = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "mrope_section": list(config.mrope_section),
        },
        "bos_token_id": None,
        "eos_token_id": ids[IM_END],
        "pad_token_id": ids[END_OF_TEXT],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": config.vision_depth,
        "hidden_size": config.vision_hidden_size,
        "intermediate_size": config.vision_intermediate_size,
        "num_heads": config.vision_heads,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [config.vision_depth - 1],
        "out_hidden_size": config.hidden_size,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )


def processor(config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLProcessor:
    """The processor; pictures keep their size from 4 to ``config.max_visual_tokens`` visual tokens."""
    bounds: dict[str, Any] = {"min_pixels": 4 * CELL**2, "max_pixels": config.max_visual_tokens * CELL**2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**bounds),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**bounds),
        chat_template=tokenizer.chat_template,
    )


def new_model(
    config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int
) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised model in fp32; eager attention, which trains faster than CPU sdpa at these sizes."""
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        model_config(config, tokenizer, layers), attn_implementation="eager", dtype=torch.float32
    )
    _look_back(model)
    return model


@torch.no_grad()
def _look_back(model: Qwen2_5_VLForConditionalGeneration, strength: float = 1.5) -> None:
    """Biases the heads of the first layer towards the tokens one, two, ... places back.

    Copying rests on heads that know the token before; started this way, a short training finds them.
    """
    text: Any = model.model.language_model
    attention, frequencies = text.layers[0].self_attn, text.rotary_emb.inv_freq
    key = torch.cat([torch.ones_like(frequencies), torch.zeros_like(frequencies)])
    attention.k_proj.bias.copy_(strength * key.repeat(text.config.num_key_value_heads))
    for head, bias in enumerate(attention.q_proj.bias.view(text.config.num_attention_heads, -1)):
        angles = (head + 1) * frequencies
        bias.copy_(strength * torch.cat([angles.cos(), -angles.sin()]))


def grow(
    model: Qwen2_5_VLForConditionalGeneration, config: TinyConfig, tokenizer: PreTrainedTokenizerBase
) -> Qwen2_5_VLForConditionalGeneration:
    """A model of ``config.layers`` that computes what the shallow ``model`` computes.

    Behind every layer follow copies of it whose output projections are zero, so that they add nothing until they are
    trained on.
    """
    shallow = model.model.language_model.layers
    deep = new_model(config, tokenizer, config.layers)
    weights = {k: v for k, v in model.state_dict().items() if ".language_model.layers." not in k}
    deep.load_state_dict(weights, strict=False)
    copies = config.layers // len(shallow)
    layers: Any = deep.model.language_model.layers
    for index, layer in enumerate(layers):
        layer.load_state_dict(shallow[index // copies].state_dict())
        if index % copies:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return deep
