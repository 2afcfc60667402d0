"""The machinery without pictures and with one rotary axis: a small Llama behind the base class."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from fovea.targets.attention import PROBED_SDPA
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget

QUESTION = Conversation("ask", [{"role": "user", "content": "name a colour"}])


@pytest.fixture(scope="module")
def llama(small_target) -> HFTarget:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=PROBED_SDPA)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return HFTarget(model, small_target.tokenizer, HFTarget.read_spec(config, (2,)))


def test_positions_have_one_axis(llama: HFTarget) -> None:
    encoded = llama.encode(QUESTION)
    assert encoded.positions.tolist() == [list(range(len(encoded.ids)))]
    assert encoded.next_position == len(encoded.ids)
    assert not encoded.is_visual.any()
    assert not encoded.vision


def test_every_node_equals_a_plain_forward_over_its_path(llama: HFTarget) -> None:
    encoded = llama.encode(QUESTION)
    state, prefill = llama.prefill(encoded, 4, draft_rows=4)
    assert prefill.visual.shape == (0, 64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    hidden = llama.extend(state, torch.tensor([50, 60, 70]), state.text_positions(torch.tensor([0, 1, 1])), mask)
    for row, path in enumerate(([50], [50, 60], [50, 70])):
        plain = llama.model(torch.cat([encoded.ids, torch.tensor(path)])[None]).logits[0, -1]
        torch.testing.assert_close(llama.lm_head(hidden[row]), plain, atol=1e-4, rtol=1e-4)


def test_answers_equal_generate(llama: HFTarget) -> None:
    encoded = llama.encode(QUESTION)
    output = llama.model.generate(encoded.ids[None], max_new_tokens=10, do_sample=False)
    other = Conversation("longer", [{"role": "user", "content": "name a colour and then another one"}])
    (given,), _ = llama.answer([QUESTION, other], 10, batch_size=2)
    assert given == output[0, len(encoded.ids) :].tolist()
