"""Attention of many draft chains to the prefix that they share: exact, and without stored scores.

Legend: ``R`` rows (one per chain, at the same step), ``B`` samples, ``L`` prefix rows, ``m`` chain rows so far,
``Q`` query heads, ``H`` key-value heads, ``G`` = Q / H, ``E`` head width, ``n`` rows of each sample in a chunk.

Row r sees prefix rows [0, slot_r] of its sample and the m rows of its own chain. Autograd would keep [Q, R, L] scores
for every unrolled step. Here they are computed a chunk at a time and once more in backward; a chunk takes n rows of
every sample, so that short samples share their matrix products, and no more prefix columns than its last row sees. All
rows of a step are one node of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Scores that are alive at once: what a processor's cache holds, or what keeps a device busy.
SCORES_ON_CPU, SCORES_ON_DEVICE = 2**21, 2**26


class _Chunk(NamedTuple):
    """``rows`` [B, n] of each sample, the last ones repeated where it has fewer; ``real`` [B, n] tells which are not.
    ``slots`` [B, n] are their last prefix rows, and ``seen`` is one more than the largest."""

    rows: Tensor
    real: Tensor
    slots: Tensor
    seen: int


@dataclass(frozen=True)
class ChainRows:
    """Which prefix rows see what; tensors on the host.

    Attributes:
        counts: [B] rows of each sample; rows of a sample are neighbours, samples in order.
        slots: [R] last prefix row that a row sees, ascending within a sample.
        device: where the attention runs.
    """

    counts: Tensor
    slots: Tensor
    device: torch.device

    @cached_property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """[B, M] rows of each sample and whether they are real."""
        place = torch.arange(int(self.counts.max()))
        first = self.counts.cumsum(0) - self.counts
        last = (self.counts - 1).clamp(min=0)
        rows = (first[:, None] + place.minimum(last[:, None])).clamp(max=len(self.slots) - 1)
        return rows, place < self.counts[:, None]

    def chunks(self, scores_per_row: int) -> Iterator[_Chunk]:
        """Chunks of as many rows per sample as the budget of scores allows."""
        budget = SCORES_ON_CPU if self.device.type == "cpu" else SCORES_ON_DEVICE
        rows, real = self._grid
        size = max(1, budget // (scores_per_row * len(self.counts)))
        for part, chosen in zip(rows.split(size, dim=1), real.split(size, dim=1), strict=True):
            slots = self.slots[part].masked_fill(~chosen, 0)
            moved = (tensor.to(self.device) for tensor in (part, chosen, slots))
            yield _Chunk(*moved, seen=int(slots.max()) + 1)


def chain_attention(
    queries: Tensor, prefix: tuple[Tensor, Tensor], chain: tuple[Tensor, Tensor], rows: ChainRows
) -> Tensor:
    """Attention output [Q, R, E], scaled by 1 / sqrt(E).

    Args:
        queries: [Q, R, E].
        prefix: keys and values [B, H, L, E].
        chain: keys and values [H, R, m, E], each row's own step being the last.
        rows: what they see.
    """
    device = queries.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else queries.dtype
    # Backward runs outside autocast, so the passes would disagree about their formats.
    with torch.autocast(device, enabled=False):
        return _ChainAttention.apply(*(part.to(dtype) for part in (queries, *prefix, *chain)), rows)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chain_keys: Tensor,
        chain_values: Tensor,
        rows: ChainRows,
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, values, chain_keys, chain_values)
        ctx.rows = rows
        out = torch.empty_like(queries)
        for chunk in rows.chunks(queries.shape[0] * keys.shape[2]):
            grouped = _take_heads(queries, chunk, keys.shape[1])
            probs = _probabilities(grouped, keys, chain_keys[:, chunk.rows], chunk)
            on_prefix, on_chain = probs[..., : chunk.seen], probs[..., chunk.seen :]
            mixed = _merge(on_prefix) @ values[:, :, : chunk.seen]
            mixed = mixed.view_as(grouped).add_(on_chain @ _by_sample(chain_values[:, chunk.rows]))
            _put_heads(out, mixed, chunk)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, chain_keys, chain_values = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (queries, keys, values, chain_keys, chain_values)]
        grad_queries, grad_keys, grad_values, grad_chain_keys, grad_chain_values = grads
        for chunk in ctx.rows.chunks(queries.shape[0] * keys.shape[2]):
            seen = chunk.seen
            own_keys, own_values = (_by_sample(part[:, chunk.rows]) for part in (chain_keys, chain_values))
            grouped = _take_heads(queries, chunk, keys.shape[1])
            # Repeated rows get no gradient, so they give none.
            grad = _take_heads(grad_out, chunk, keys.shape[1]) * chunk.real[:, None, :, None, None]
            probs = _probabilities(grouped, keys, chain_keys[:, chunk.rows], chunk)
            on_prefix = _merge(grad) @ values[:, :, :seen].mT
            grad_probs = torch.cat((on_prefix.unflatten(2, grad.shape[2:4]), grad @ own_values.mT), dim=-1)
            grad_values[:, :, :seen] += _merge(probs[..., :seen]).mT @ _merge(grad)
            _put_chains(grad_chain_values, probs[..., seen:].mT @ grad, chunk)
            grad_scores = grad_probs.sub_((grad_probs * probs).sum(-1, keepdim=True)).mul_(probs)
            grad_scores.mul_(queries.shape[-1] ** -0.5)
            on_prefix, on_chain = grad_scores[..., :seen], grad_scores[..., seen:]
            grad_grouped = (_merge(on_prefix) @ keys[:, :, :seen]).view_as(grouped).add_(on_chain @ own_keys)
            _put_heads(grad_queries, grad_grouped, chunk)
            grad_keys[:, :, :seen] += _merge(on_prefix).mT @ _merge(grouped)
            _put_chains(grad_chain_keys, on_chain.mT @ grouped, chunk)
        return (*grads, None)


def _take_heads(heads: Tensor, chunk: _Chunk, num_kv_heads: int) -> Tensor:
    """Rows of ``heads`` [Q, R, E] as [B, H, n, G, E]."""
    grouped = heads.unflatten(0, (num_kv_heads, -1))[:, :, chunk.rows]
    return grouped.permute(2, 0, 3, 1, 4).contiguous()


def _put_heads(out: Tensor, grouped: Tensor, chunk: _Chunk) -> None:
    """Writes the real rows of ``grouped`` [B, H, n, G, E] into ``out`` [Q, R, E]."""
    out[:, chunk.rows[chunk.real]] = grouped.permute(0, 2, 1, 3, 4)[chunk.real].flatten(1, 2).transpose(0, 1)


def _put_chains(out: Tensor, chains: Tensor, chunk: _Chunk) -> None:
    """Writes the real rows of ``chains`` [B, H, n, m, E] into ``out`` [H, R, m, E]."""
    out[:, chunk.rows[chunk.real]] = chains.transpose(1, 2)[chunk.real].transpose(0, 1)


def _by_sample(chains: Tensor) -> Tensor:
    """[H, B, n, m, E] as [B, H, n, m, E]."""
    return chains.transpose(0, 1)


def _merge(grouped: Tensor) -> Tensor:
    """[B, H, n, G, x] as [B, H, n G, x], a matrix for each key head."""
    return grouped.flatten(2, 3)


def _probabilities(queries: Tensor, keys: Tensor, chain_keys: Tensor, chunk: _Chunk) -> Tensor:
    """[B, H, n, G, seen + m] softmax over ``keys`` [B, H, L, E] to each slot, then ``chain_keys`` [H, B, n, m, E]."""
    scaled = queries * queries.shape[-1] ** -0.5
    scores = _merge(scaled) @ keys[:, :, : chunk.seen].mT
    hidden = torch.arange(chunk.seen, device=keys.device) > chunk.slots[:, None, :, None, None]
    scores = scores.unflatten(2, queries.shape[2:4]).masked_fill_(hidden, -torch.inf)
    scores = torch.cat((scores, scaled @ _by_sample(chain_keys).mT), dim=-1)
    # Half-precision scores are exponentiated in float32, as fused attention kernels do.
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
