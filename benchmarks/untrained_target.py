"""Targets of random weights for the benchmarks: nothing has to be trained or downloaded to time a pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.targets.attention import PROBED_SDPA
from fovea.targets.base import Encoded
from fovea.targets.qwen25vl import Qwen25VL
from fovea.visual.retrieval import RetrievalConfig


@dataclass(frozen=True)
class Size:
    """A target's shape, and the request that it decodes."""

    text: dict[str, Any]
    vision: dict[str, Any]
    grid: tuple[int, int]
    text_tokens: int
    retrieval: RetrievalConfig


SIZES = {
    "small": Size(
        text={
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": 512,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        },
        vision={"depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "fullatt_block_indexes": [2]},
        grid=(8, 8),
        text_tokens=56,
        retrieval=RetrievalConfig(k_min=4, k_max=32),
    ),
    "qwen25vl-7b": Size(
        text={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        grid=(28, 36),
        text_tokens=120,
        retrieval=RetrievalConfig(),
    ),
}


def build_target(size: Size, device: torch.device, dtype: torch.dtype) -> Qwen25VL:
    """The target with random weights, made on its device; logits have a standard deviation of about 4."""
    special: dict[str, Any] = {
        name: size.text["vocab_size"] - place
        for place, name in enumerate(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), start=1
        )
    }
    text = size.text | {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config: Any = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=size.vision | {"out_hidden_size": size.text["hidden_size"]},
        tie_word_embeddings=size.text["tie_word_embeddings"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **special,
    )
    torch.manual_seed(0)
    build: Any = Qwen2_5_VLForConditionalGeneration
    with torch.device(device):
        model = build._from_config(config, attn_implementation="sdpa", dtype=dtype)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        head.weight.mul_(4)
    model.set_attn_implementation({"text_config": PROBED_SDPA})
    model.generation_config = GenerationConfig(eos_token_id=[0], pad_token_id=0)
    processor = SimpleNamespace(image_token="<image>", chat_template="none", all_special_tokens=[])
    return Qwen25VL(model, processor, Qwen25VL.read_spec(config, eos_ids=(0,)))


def build_request(target: Qwen25VL, size: Size) -> Encoded:
    """One picture of noise between random words."""
    rows, columns = size.grid
    visual = rows * columns
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, target.spec.vocab_size - 8, (size.text_tokens + visual,), generator=generator)
    ids[4 : 4 + visual] = image = target.spec.placeholder_ids[0]
    is_visual = ids == image
    positions, next_position = target.rotary_positions(is_visual, [size.grid])
    vision_config = target.model.config.vision_config
    patches = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    merge = vision_config.spatial_merge_size
    pixels = torch.randn(visual * merge**2, patches, generator=generator).to(target.dtype)
    vision = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows * merge, columns * merge]])}
    nothing = torch.zeros_like(is_visual)
    return Encoded("noise", ids, positions, nothing, next_position, is_visual, vision, (size.grid,))
