"""Decoder blocks of the target's kind: RMSNorm, grouped-query attention with rotary embedding, SwiGLU.

Legend: ``B`` batch, ``n`` rows, ``D`` hidden width, ``Q`` query heads, ``H`` key-value heads, ``E`` head width,
``I`` width of the MLP.

A block knows nothing of caches and masks. It hands its queries, keys and values to an ``attend`` function, so that
training (many chains over one prefix) and decoding (a tree behind a cache) run the very same block.

Weights: ``qkv_proj`` [(Q + 2H) E, D] holds the rows of q, then k, then v, each head by head; ``gate_up_proj`` [2I, D]
the rows of gate, then up; ``o_proj``, ``down_proj`` and the norms are as in Llama and Qwen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.drafters.norm import RMSNorm
from fovea.drafters.rotary import Rotation
from fovea.targets.base import TargetSpec

#: ``attend(layer, queries [B, Q, n, E], keys [B, H, n, E], values [B, H, n, E]) -> [B, Q, n, E]``; brings the mask and
#: whatever the rows see beside each other.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * hidden_width, bias=False)
        self.down_proj = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderBlock(nn.Module):
    """One block of the target's architecture; ``layer`` is its place in the cache.

    EAGLE's first block is without ``input_norm``: it reads its input as it is. EAGLE-3's attention reads ``beside``
    more numbers per row, which its residual stream does not hold.
    """

    def __init__(self, spec: TargetSpec, layer: int, *, input_norm: bool = True, beside: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.input_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps) if input_norm else nn.Identity()
        self.qkv_proj = nn.Linear(beside + spec.hidden_size, query_width + 2 * kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query_width, spec.hidden_size, bias=False)
        self.mlp_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, beside: Tensor | None = None) -> Tensor:
        """Output [B, n, D] of ``x`` [B, n, D]; the rotations [n, 1, E] or [B, n, 1, E] are those of its rows.

        ``beside`` [B, n, any] is what the attention reads before ``x``, as it is.
        """
        batch, rows, _ = x.shape
        read = self.input_norm(x) if beside is None else torch.cat((beside, self.input_norm(x)), dim=-1)
        heads = self.qkv_proj(read).view(batch, rows, -1, self.head_dim)
        heads, values = torch.split_with_sizes(heads, (self.num_heads + self.num_kv_heads, self.num_kv_heads), 2)
        heads = torch.addcmul(heads * rotation.cos, heads.roll(self.head_dim // 2, -1), rotation.sin)
        queries, keys = torch.split_with_sizes(heads.transpose(1, 2), (self.num_heads, self.num_kv_heads), 1)
        mixed = attend(self.layer, queries, keys, values.transpose(1, 2))
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return x + self.mlp(self.mlp_norm(x))


class CrossAttentionBlock(nn.Module):
    """DREAM's block: the stream asks, target states answer (the drafter's own states below the root of a tree).

    Heads as in the target, RMSNorm on each query and key head, no rotary embedding, own MLP. Attention and MLP enter
    through tanh gates that start at 0.
    """

    def __init__(self, spec: TargetSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.input_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.q_proj = nn.Linear(spec.hidden_size, query_width, bias=False)
        self.kv_proj = nn.Linear(spec.hidden_size, 2 * kv_width, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.o_proj = nn.Linear(query_width, spec.hidden_size, bias=False)
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.mlp_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size)
        self.mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, states: Tensor, attend: Attend) -> Tensor:
        """Output [B, n, D] of the stream ``x`` [B, n, D]; ``states`` [B, n, D] become keys and values."""
        batch, rows, _ = x.shape
        queries = self.q_norm(self.q_proj(self.input_norm(x)).view(batch, rows, -1, self.head_dim))
        keys, values = self.kv_proj(states).view(batch, rows, -1, self.head_dim).chunk(2, dim=2)
        mixed = attend(self.layer, queries.transpose(1, 2), self.k_norm(keys).transpose(1, 2), values.transpose(1, 2))
        x = x + self.attention_gate.tanh() * self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return x + self.mlp_gate.tanh() * self.mlp(self.mlp_norm(x))
