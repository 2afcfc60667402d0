"""Sizes of targets, against transformers' models of the same configuration and the published totals."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, Qwen2Config

from fovea.app.launch import CONFIG_DIR
from fovea.targets.architecture import Architecture, read_architecture
from fovea.targets.checkpoint import CheckpointError
from tests.targets.published_layouts import PUBLISHED


def conf(name: str) -> Architecture:
    node = OmegaConf.load(CONFIG_DIR / "model" / f"{name}.yaml").architecture
    return Architecture(**OmegaConf.to_container(node))


#: Configurations by preset; Open-LLaVA-NeXT's is made by the project, of the sizes of LLaVA-NeXT's.
CONFIGURATIONS = PUBLISHED | {
    "open_llava_next_7b": PUBLISHED["llava_next_vicuna_7b"],
    "causal_lm": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        architectures=["Qwen2ForCausalLM"],
    ).to_dict(),
    "smollm2": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).to_dict(),
}
#: Parameters that the hub counts, where we know them.
PARAMETERS = {
    "qwen25vl": 8_292_166_656,
    "qwen25vl_3b": 3_754_622_976,
    "llava15_7b": 7_063_427_072,
    "causal_lm": 7_615_616_512,
    "smollm2": 134_515_008,
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_sizes_in_conf_are_those_of_the_published_configuration(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
    found = read_architecture(tmp_path)
    assert conf(name).differences(found) == {}
    assert found.parameters == PARAMETERS.get(name, found.parameters)


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
