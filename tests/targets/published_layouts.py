"""The config.json of published checkpoints as their makers wrote them, and small checkpoints brought into that layout.

They are older than the transformers that reads them: Qwen2.5-VL's text settings lie at the top level beside the vision
tower's, and a LLaVA's text settings hold only what its makers changed of Llama's or Mistral's.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "vision_token_id": 151_654,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18_944,
    "max_position_embeddings": 128_000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "sliding_window": 32_768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152_064,
}
_QWEN_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vision_config": _QWEN_7B["vision_config"] | {"out_hidden_size": 2048},
    "vocab_size": 151_936,
}
_CLIP = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32_000,
}
_VICUNA_7B = {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32_064,
}
_VICUNA_13B = _VICUNA_7B | {
    "_name_or_path": "lmsys/vicuna-13b-v1.5",
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
}
_MISTRAL_7B = {
    "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32_064,
}


def _llava(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32_000,
        "model_type": "llava",
        "pad_token_id": 32_001,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "float16",
        "transformers_version": "4.36.0.dev0",
        "vision_config": _CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32_064,
    }


def _llava_next(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32_000,
        "model_type": "llava_next",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "float16",
        "transformers_version": "4.39.0.dev0",
        "use_image_newline_parameter": True,
        "vision_config": _CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


#: By preset of ``conf/model``.
PUBLISHED = {
    "qwen25vl": _QWEN_7B,
    "qwen25vl_3b": _QWEN_7B | _QWEN_3B,
    "llava15_7b": _llava(_VICUNA_7B),
    "llava15_13b": _llava(_VICUNA_13B),
    "llava_next_vicuna_7b": _llava_next(_VICUNA_7B),
    "llava_next_vicuna_13b": _llava_next(_VICUNA_13B),
    "llava_next_mistral_7b": _llava_next(_MISTRAL_7B),
}


def with_layers(published: dict[str, Any], count: int) -> dict[str, Any]:
    """A published configuration with ``count`` decoder layers."""
    config = copy.deepcopy(published)
    config.get("text_config", config)["num_hidden_layers"] = count
    return config


#: Sizes of the small language models that are not the defaults of Llama and Mistral.
_OTHER_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")


def into_published_layout(folder: Path, preset: str) -> None:
    """Rewrites the small checkpoint in ``folder``, as transformers saves it today, in the layout of ``preset``'s."""
    _rewrite_config(folder / "config.json", PUBLISHED[preset])
    _rewrite_processor(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _rewrite_config(file: Path, published: dict[str, Any]) -> None:
    small = json.loads(file.read_text())
    text, vision, config = small["text_config"], small["vision_config"], copy.deepcopy(published)
    config |= {
        name: small[name] for name in config.keys() & small.keys() if name not in ("text_config", "vision_config")
    }
    config["vision_config"] |= {name: vision[name] for name in config["vision_config"].keys() & vision.keys()}
    if "text_config" in config:
        kept = (config["text_config"].keys() | set(_OTHER_SIZES)) & text.keys()
        config["text_config"] |= {name: text[name] for name in kept}
        config |= {"vocab_size": text["vocab_size"]} if "vocab_size" in config else {}
        if "rope_theta" in config["text_config"]:
            config["text_config"]["rope_theta"] = text["rope_parameters"]["rope_theta"]
    else:
        config |= {name: text[name] for name in (config.keys() & text.keys()) - {"model_type"}}
        config["rope_theta"] = text["rope_parameters"]["rope_theta"]
        config["rope_scaling"]["mrope_section"] = text["rope_parameters"]["mrope_section"]
    config.pop("pad_token_id", None)
    file.write_text(json.dumps(config))


def _rewrite_processor(folder: Path) -> None:
    """preprocessor_config.json and chat_template.json, as there were before processor_config.json held all."""
    whole = json.loads((folder / "processor_config.json").read_text())
    images, kind = whole.pop("image_processor"), whole["processor_class"]
    if kind == "Qwen2_5_VLProcessor":
        size = images.pop("size")
        images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        (folder / "processor_config.json").unlink()
    else:
        (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"processor_class": kind}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
