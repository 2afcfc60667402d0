"""Targets of random weights for the benchmarks: nothing has to be trained or downloaded to time a pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LlavaConfig, Qwen2_5_VLConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.targets.attention import PROBED_SDPA
from fovea.targets.base import Encoded
from fovea.targets.hf import HFTarget
from fovea.targets.llava import Llava
from fovea.targets.qwen25vl import Qwen25VL
from fovea.visual.retrieval import RetrievalConfig


@dataclass(frozen=True)
class Size:
    """A target's shape, and the request that it decodes: a Qwen2.5-VL, or a LLaVA-1.5 if its tower is CLIP's."""

    text: dict[str, Any]
    vision: dict[str, Any]
    grid: tuple[int, int]
    text_tokens: int
    retrieval: RetrievalConfig

    @property
    def is_llava(self) -> bool:
        """Whether it is a LLaVA-1.5."""
        return self.vision.get("model_type") == "clip_vision_model"


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
    "llava15-7b": Size(
        text={
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
        },
        vision={
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
        grid=(24, 24),
        text_tokens=120,
        retrieval=RetrievalConfig(),
    ),
}


def build_target(size: Size, device: torch.device, dtype: torch.dtype) -> HFTarget:
    """The target with random weights, made on its device; logits have a standard deviation of about 4."""
    text = size.text | {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    adapter, config = (Llava, _llava_config(size, text)) if size.is_llava else (Qwen25VL, _qwen_config(size, text))
    config.architectures = [adapter.model_class.__name__]
    torch.manual_seed(0)
    with torch.device(device):
        model = adapter.model_class._from_config(config, attn_implementation="sdpa", dtype=dtype)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        head.weight.mul_(4)
    model.set_attn_implementation({"text_config": PROBED_SDPA})
    model.generation_config = GenerationConfig(eos_token_id=[0], pad_token_id=0)
    processor = SimpleNamespace(image_token="<image>", chat_template="none", all_special_tokens=[])
    return adapter(model, processor, adapter.read_spec(config, eos_ids=(0,)))


def _qwen_config(size: Size, text: dict[str, Any]) -> Any:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special: dict[str, Any] = {name: size.text["vocab_size"] - place for place, name in enumerate(names, start=1)}
    vision = size.vision | {"out_hidden_size": size.text["hidden_size"]}
    tied = size.text["tie_word_embeddings"]
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **special)


def _llava_config(size: Size, text: dict[str, Any]) -> Any:
    image, tied = size.text["vocab_size"] - 1, size.text["tie_word_embeddings"]
    return LlavaConfig(text_config=text, vision_config=size.vision, image_token_index=image, tie_word_embeddings=tied)


def build_request(target: HFTarget, size: Size) -> Encoded:
    """One picture of noise between random words."""
    rows, columns = size.grid
    visual = rows * columns
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, target.spec.vocab_size - 8, (size.text_tokens + visual,), generator=generator)
    ids[4 : 4 + visual] = image = target.spec.placeholder_ids[0]
    is_visual = ids == image
    positions, next_position = target.rotary_positions(is_visual, [size.grid])
    vision_config: Any = target.model.config.vision_config
    if size.is_llava:
        side = vision_config.image_size
        vision = {"pixel_values": torch.randn(1, 3, side, side, generator=generator).to(target.dtype)}
    else:
        patches = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
        merge = vision_config.spatial_merge_size
        pixels = torch.randn(visual * merge**2, patches, generator=generator).to(target.dtype)
        vision = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows * merge, columns * merge]])}
    nothing = torch.zeros_like(is_visual)
    return Encoded("noise", ids, positions, nothing, next_position, is_visual, vision, (size.grid,))
