"""One block equals transformers' Qwen2.5-VL decoder layer with the same weights; DREAM's block, by its definition."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLDecoderLayer,
    Qwen2_5_VLRotaryEmbedding,
)

from fovea.drafters.blocks import CrossAttentionBlock, DecoderBlock
from fovea.drafters.norm import RMSNorm
from fovea.drafters.rotary import Rotary
from fovea.targets.base import RopeSpec, TargetSpec

ROWS = 9


def causal(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def reference(spec: TargetSpec, sections: list[int]) -> tuple[Qwen2_5_VLDecoderLayer, Qwen2_5_VLRotaryEmbedding]:
    config = Qwen2_5_VLTextConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta, "mrope_section": sections},
    )
    config._attn_implementation = "eager"
    layer = Qwen2_5_VLDecoderLayer(config, 0)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 1.0))
    return layer, Qwen2_5_VLRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]


def adopt(block: DecoderBlock, layer: Qwen2_5_VLDecoderLayer) -> None:
    """Puts transformers' weights where our names say they are."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    block.load_state_dict(
        {
            "input_norm.weight": layer.input_layernorm.weight,
            "qkv_proj.weight": torch.cat([p.weight for p in qkv]),
            "qkv_proj.bias": torch.cat([p.bias for p in qkv]),
            "o_proj.weight": attention.o_proj.weight,
            "mlp_norm.weight": layer.post_attention_layernorm.weight,
            "mlp.gate_up_proj.weight": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            "mlp.down_proj.weight": mlp.down_proj.weight,
        }
    )


@pytest.mark.parametrize("kind", ["one axis", "text", "picture"])
def test_block_equals_transformers(spec: TargetSpec, kind: str) -> None:
    torch.manual_seed(0)
    positions = torch.arange(5, 5 + ROWS).expand(3, -1).clone()
    if kind == "picture":
        positions[1, 2:8] = torch.tensor([7, 7, 7, 8, 8, 8])
        positions[2, 2:8] = torch.tensor([7, 8, 9, 7, 8, 9])
        positions[0, 2:8] = 7
    if kind == "one axis":
        # A single section that takes every frequency is the plain rotary embedding.
        spec, layer_sections = replace(spec, rope=RopeSpec(spec.rope.theta)), [spec.head_dim // 2, 0, 0]
        ours = positions[:1]
    else:
        assert spec.rope.mrope_section is not None
        layer_sections, ours = list(spec.rope.mrope_section), positions
    layer, rotary = reference(spec, layer_sections)
    block = DecoderBlock(spec, 0)
    adopt(block, layer)
    x = torch.randn(1, ROWS, spec.hidden_size)
    mask = torch.full((ROWS, ROWS), -torch.inf).triu(1)[None, None]
    expected = layer(x, attention_mask=mask, position_embeddings=rotary(x, positions[:, None]))
    got = block(x, Rotary(spec.rope, spec.head_dim)(ours, x.dtype), causal)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_block_without_input_norm_reads_its_input_as_it_is(spec: TargetSpec) -> None:
    torch.manual_seed(0)
    bare, normed = DecoderBlock(spec, 0, input_norm=False), DecoderBlock(spec, 0)
    normed.load_state_dict(bare.state_dict(), strict=False)
    assert {name for name, _ in normed.named_parameters()} - {name for name, _ in bare.named_parameters()} == {
        "input_norm.weight"
    }
    rotation = Rotary(spec.rope, spec.head_dim)(torch.arange(ROWS).expand(3, -1), torch.float32)
    # Rows of mean square 1 are what the norm makes of them.
    x = F.rms_norm(torch.randn(1, ROWS, spec.hidden_size), (spec.hidden_size,))
    torch.testing.assert_close(bare(x, rotation, causal), normed(x, rotation, causal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(bare(3 * x, rotation, causal) - 3 * x, normed(3 * x, rotation, causal) - 3 * x)


def test_text_rotations_come_from_a_table_that_grows(spec: TargetSpec) -> None:
    rotary = Rotary(spec.rope, spec.head_dim)
    for start, count in ((0, 3), (5, 1), (200, 7), (3000, 2), (1, 4)):
        table = rotary.text(start, count, torch.float32, torch.device("cpu"))
        direct = rotary(torch.arange(start, start + count).expand(3, -1), torch.float32)
        assert torch.equal(table.cos, direct.cos)
        assert torch.equal(table.sin, direct.sin)


def test_low_precision_keeps_float32_angles(spec: TargetSpec) -> None:
    rotary = Rotary(spec.rope, spec.head_dim)
    exact = rotary.text(4001, 1, torch.float32, torch.device("cpu"))
    rounded = rotary.text(4001, 1, torch.bfloat16, torch.device("cpu"))
    torch.testing.assert_close(rounded.cos.float(), exact.cos, rtol=0, atol=2**-8)


def test_cross_attention_reads_states_and_starts_closed(spec: TargetSpec) -> None:
    torch.manual_seed(0)
    block = CrossAttentionBlock(spec, 2)
    x, states = torch.randn(1, ROWS, spec.hidden_size), torch.randn(1, ROWS, spec.hidden_size)
    assert torch.equal(block(x, states, causal), x)

    torch.nn.init.constant_(block.attention_gate, 0.7)
    torch.nn.init.constant_(block.mlp_gate, -0.4)
    queries = block.q_norm(block.q_proj(block.input_norm(x)).view(ROWS, spec.num_heads, spec.head_dim))
    keys, values = block.kv_proj(states).view(ROWS, 2, spec.num_kv_heads, spec.head_dim).unbind(1)
    keys, group = block.k_norm(keys), spec.num_heads // spec.num_kv_heads
    rows = []
    for row in range(ROWS):
        heads = []
        for number in range(spec.num_heads):
            scores = keys[: row + 1, number // group] @ queries[row, number] / spec.head_dim**0.5
            heads.append(scores.softmax(0) @ values[: row + 1, number // group])
        rows.append(torch.cat(heads))
    y = x + torch.tensor(0.7).tanh() * block.o_proj(torch.stack(rows))
    y = y + torch.tensor(-0.4).tanh() * block.mlp(block.mlp_norm(y))
    torch.testing.assert_close(block(x, states, causal), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_equals_the_formula_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(12, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (torch.randn(5, 12) * torch.tensor([1e-3, 1e-2, 1, 10, 0])[:, None]).to(dtype).requires_grad_()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)
    assert norm(x).dtype == dtype
    cotangent = torch.randn(5, 12, dtype=torch.float64)
    got = torch.autograd.grad((norm(x).double() * cotangent).sum(), x)[0].double()
    want = torch.autograd.grad((expected * cotangent).sum(), x)[0].double()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=40 * tolerance)
