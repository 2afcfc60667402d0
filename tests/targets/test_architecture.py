"""Sizes of targets, against transformers' models of the same configuration and the published totals."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
)

from fovea.app.launch import CONFIG_DIR
from fovea.targets.architecture import Architecture, read_architecture
from fovea.targets.checkpoint import CheckpointError


def conf(name: str) -> Architecture:
    node = OmegaConf.load(CONFIG_DIR / "model" / f"{name}.yaml").architecture
    return Architecture(**OmegaConf.to_container(node))


VICUNA_7B = LlamaConfig(vocab_size=32_064, max_position_embeddings=4096)
VICUNA_13B = LlamaConfig(
    hidden_size=5120,
    intermediate_size=13_824,
    num_hidden_layers=40,
    num_attention_heads=40,
    vocab_size=32_064,
    max_position_embeddings=4096,
)
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}


def qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool):
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": hidden}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


#: Configurations as published, the adapter's architecture, and the parameters that the hub counts, where we know them.
PUBLISHED = {
    "qwen25vl": (qwen(3584, 18_944, 28, 28, 4, 152_064, False), "Qwen2_5_VL", 8_292_166_656),
    "qwen25vl_3b": (qwen(2048, 11_008, 36, 16, 2, 151_936, True), "Qwen2_5_VL", 3_754_622_976),
    "llava15_7b": (LlavaConfig(text_config=VICUNA_7B, vision_config=CLIP), "Llava", 7_063_427_072),
    "llava15_13b": (LlavaConfig(text_config=VICUNA_13B, vision_config=CLIP), "Llava", None),
    "llava_next_vicuna_7b": (LlavaNextConfig(text_config=VICUNA_7B, vision_config=CLIP), "LlavaNext", None),
    "open_llava_next_7b": (LlavaNextConfig(text_config=VICUNA_7B, vision_config=CLIP), "LlavaNext", None),
    "llava_next_vicuna_13b": (LlavaNextConfig(text_config=VICUNA_13B, vision_config=CLIP), "LlavaNext", None),
    "llava_next_mistral_7b": (
        LlavaNextConfig(
            text_config=MistralConfig(vocab_size=32_064, sliding_window=None, max_position_embeddings=32_768),
            vision_config=CLIP,
        ),
        "LlavaNext",
        None,
    ),
    "causal_lm": (
        Qwen2Config(
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=32_768,
        ),
        "Qwen2ForCausalLM",
        7_615_616_512,
    ),
    "smollm2": (
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49_152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        "LlamaForCausalLM",
        134_515_008,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_in_conf_are_those_of_the_published_configuration(name, tmp_path):
    config, kind, parameters = PUBLISHED[name]
    kind = kind if kind.endswith("LM") else f"{kind}ForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [kind]}))
    found = read_architecture(tmp_path)
    assert conf(name).differences(found) == {}
    assert parameters is None or found.parameters == parameters


def test_a_checkpoint_is_as_large_as_told(small_target, small_target_path):
    """Also without its weights: the configuration says it."""
    found = read_architecture(small_target_path)
    model = small_target.model
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    layers = sum(weight.numel() for weight in model.get_decoder().layers.parameters())
    assert found.num_layers * found.layer_parameters == layers
    assert (found.rotary_axes, found.qkv_bias, found.max_positions) == (3, True, 2048)
    state, _ = small_target.prefill(small_target.encode(_question()), 5)
    assert found.cache_numbers * state.cache.capacity == state.cache.buffer.numel()


def test_a_drafter_of_the_told_sizes_has_the_parameters_of_one_for_the_target(small_target):
    from fovea.drafters.registry import DRAFTERS, build_drafter

    spec = small_target.spec
    told = Architecture(
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.rope.axes,
        spec.qkv_bias,
    ).spec()
    for name, kind in DRAFTERS.items():
        config = kind.config_type(draft_vocabulary=None)
        own = build_drafter(name, spec, config, small_target.head)
        with torch.device("meta"):
            planned = build_drafter(name, told, config, small_target.head.to("meta"))
        assert planned.trainable_parameters() == own.trainable_parameters()


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 0), ("vision_parameters", -1), ("num_kv_heads", 3)])
def test_impossible_sizes_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Architecture(
            **(
                {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 8}
                | {"num_kv_heads": 2, "head_dim": 8, "vocab_size": 100}
                | {field: value}
            )
        )


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_architecture(tmp_path)


def _question():
    from fovea.targets.conversation import Conversation

    return Conversation("q", [{"role": "user", "content": [{"type": "text", "text": "what is it?"}]}], ())
