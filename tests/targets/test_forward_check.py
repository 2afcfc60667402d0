"""Language models that no test knows, alone and in a VLM: those that are more than their layers are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    Olmo2Config,
    Qwen3Config,
    StableLmConfig,
)

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import RandomProposer
from fovea.decoding.speculative import generate
from fovea.targets.conversation import Conversation
from fovea.targets.load import ADAPTERS, load_target
from fovea.targets.spec import UnsupportedTargetError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TEMPLATE = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '</s>' }}{% endfor %}[assistant]"


@pytest.fixture
def saved(twin_of: Any, llama_tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    def make(kind: Any, **sizes: Any) -> Any:
        tokenizer = llama_tokenizer()
        tokenizer.chat_template = TEMPLATE
        model = AutoModelForCausalLM.from_config(kind(vocab_size=len(tokenizer), **sizes))
        return twin_of(model, tmp_path, tokenizer, tokenizer, eos="</s>")

    return make


def test_one_whose_layers_are_all_there_is_decodes_like_any_other(saved) -> None:
    """OLMo 2 norms behind its blocks, and queries and keys too; all of that is inside its layers."""
    one = saved(Olmo2Config, **SIZES)
    assert one.target.spec.architecture not in ADAPTERS
    conversation = Conversation("x", [{"role": "user", "content": "what is the red square"}])
    encoded, expected = one.target.encode(conversation), one.generate(conversation, 12)
    assert generate_autoregressive(one.target, encoded, max_new_tokens=12).tokens == expected
    proposer = RandomProposer(vocab_size=300, nodes=12, answer=expected, hit_rate=0.8)
    assert generate(one.target, proposer, encoded, max_new_tokens=12).tokens == expected


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (GemmaConfig, SIZES | {"head_dim": 16}, "GemmaForCausalLM computes more than"),  # scales its embeddings
        (GraniteConfig, SIZES | {"logits_scaling": 4.0}, "GraniteForCausalLM computes more than"),
        (CohereConfig, SIZES, "CohereForCausalLM has no RMS norm"),
        (StableLmConfig, SIZES, "StableLmForCausalLM has no RMS norm"),
        (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4}, "GPT2LMHeadModel; supported are|no rotary embedding"),
    ],
)
def test_others_are_refused_by_name(saved, kind, sizes, message) -> None:
    one = saved(kind, **sizes)
    with pytest.raises(UnsupportedTargetError, match=message):
        load_target(one.folder)


SEEING = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% for p in m['content'] %}"
    "{{ '<image>\\n' if p['type'] == 'image' else p['text'] }}{% endfor %}</s>{% endfor %}[assistant]"
)


@pytest.fixture
def seeing(twin_of: Any, llama_tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes a LLaVA-1.5 or LLaVA-NeXT around a language model of ``kind``."""

    def make(kind: Any, *, tiles: bool, **sizes: Any) -> Any:
        tokenizer = llama_tokenizer()
        size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
        shared = {
            "text_config": kind(vocab_size=len(tokenizer), **sizes),
            "vision_config": CLIPVisionConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28,
                patch_size=7,
            ),
            "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        }  # fmt: skip
        pinpoints = [[28, 56], [56, 28]]
        if tiles:
            config: Any = LlavaNextConfig(**shared, image_grid_pinpoints=pinpoints)
            images = LlavaNextImageProcessor(**size, image_grid_pinpoints=pinpoints)
            processor: Any = LlavaNextProcessor(images, tokenizer, chat_template=SEEING)
        else:
            config = LlavaConfig(**shared)
            processor = LlavaProcessor(CLIPImageProcessor(**size), tokenizer, chat_template=SEEING)
        return twin_of(AutoModelForImageTextToText.from_config(config), tmp_path, processor, tokenizer, eos="</s>")

    return make


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "name"),
    [
        (GemmaConfig, SIZES | {"head_dim": 16}, "gemma"),
        (GraniteConfig, SIZES | {"embedding_multiplier": 12.0}, "granite"),
    ],
)
def test_a_vlm_around_one_that_does_more_is_refused(seeing, kind, sizes, name, tiles) -> None:
    """Both loops would leave the same factor out, and no comparison of the two would show it."""
    one = seeing(kind, tiles=tiles, **sizes)
    family = "LlavaNext" if tiles else "Llava"
    with pytest.raises(UnsupportedTargetError, match=rf"^{family}\w+ around a {name} computes more than .*new_target"):
        load_target(one.folder)


def test_a_vlm_around_one_whose_layers_are_all_there_is_answers_as_transformers_does(seeing, small_conversations):
    one = seeing(Qwen3Config, tiles=False, **SIZES | {"head_dim": 16})
    for conversation in small_conversations[-1:] + small_conversations[5:6]:
        answer = generate_autoregressive(one.target, one.target.encode(conversation), max_new_tokens=10).tokens
        assert answer == one.generate(conversation, 10)


@pytest.mark.parametrize("text", [LlamaConfig, Qwen3Config])
def test_somebodys_own_adapter_is_checked_whatever_it_holds(seeing, monkeypatch, text) -> None:
    class Halved(ADAPTERS["LlavaForConditionalGeneration"]):
        def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().lm_head(hidden) / 2

    one = seeing(text, tiles=False, **SIZES)
    assert load_target(one.folder).image_token == "<image>"
    monkeypatch.setitem(ADAPTERS, "LlavaForConditionalGeneration", Halved)
    with pytest.raises(UnsupportedTargetError, match="computes more than"):
        load_target(one.folder)
