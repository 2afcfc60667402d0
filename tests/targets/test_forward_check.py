"""Language models that nobody has listed: those whose layers are all there is are taken, the others refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    Olmo2Config,
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
