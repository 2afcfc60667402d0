"""Attention of many draft chains to the prefix that they share: exact, and without stored scores.

Legend: ``R`` rows (one per chain, at the same step), ``B`` samples, ``L`` prefix rows, ``m`` chain rows so far,
``Q`` query heads, ``H`` key-value heads, ``G`` = Q / H, ``E`` head width.

Row r sees prefix rows [0, slot_r] of its sample and the m rows of its own chain. Autograd would keep [Q, R, L] scores
for every unrolled step. Here they are computed a chunk of rows at a time and once more in backward, with no more
prefix columns than the chunk's last row sees; and all rows of a step are one node of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Rows whose scores are alive at once.
CHUNK_ROWS = 256


@dataclass(frozen=True)
class ChainRows:
    """Which prefix rows see what: rows of a sample are neighbours, by ascending slot.

    Attributes:
        spans: per sample with rows, (sample, first row, end row).
        slots: [R] int64 last prefix row that a row sees; on the device.
        slots_on_host: the same numbers.
    """

    spans: list[tuple[int, int, int]]
    slots: Tensor
    slots_on_host: list[int]

    def chunks(self) -> Iterator[tuple[int, slice, int]]:
        """(sample, rows, prefix rows that the last of them sees) of each chunk."""
        for sample, start, end in self.spans:
            for first in range(start, end, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, end)
                yield sample, slice(first, last), self.slots_on_host[last - 1] + 1


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
        for sample, chunk, seen in rows.chunks():
            grouped = _grouped(queries[:, chunk], keys.shape[1])
            probs = _probabilities(grouped, keys[sample, :, :seen], chain_keys[:, chunk], rows.slots[chunk])
            mixed = torch.einsum("hgnl,hle->hgne", probs[..., :seen], values[sample, :, :seen])
            mixed += torch.einsum("hgnm,hnme->hgne", probs[..., seen:], chain_values[:, chunk])
            out[:, chunk] = mixed.flatten(0, 1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, chain_keys, chain_values = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in (queries, keys, values, chain_keys, chain_values)]
        grad_queries, grad_keys, grad_values, grad_chain_keys, grad_chain_values = grads
        for sample, chunk, seen in ctx.rows.chunks():
            grouped = _grouped(queries[:, chunk], keys.shape[1])
            grad = _grouped(grad_out[:, chunk], keys.shape[1])
            probs = _probabilities(grouped, keys[sample, :, :seen], chain_keys[:, chunk], ctx.rows.slots[chunk])
            grad_values[sample, :, :seen] += torch.einsum("hgnl,hgne->hle", probs[..., :seen], grad)
            grad_chain_values[:, chunk] = torch.einsum("hgnm,hgne->hnme", probs[..., seen:], grad)
            grad_probs = torch.cat(
                (
                    torch.einsum("hgne,hle->hgnl", grad, values[sample, :, :seen]),
                    torch.einsum("hgne,hnme->hgnm", grad, chain_values[:, chunk]),
                ),
                dim=-1,
            )
            mean = torch.einsum("hgnl,hgnl->hgn", probs, grad_probs)
            grad_scores = grad_probs.sub_(mean[..., None]).mul_(probs).mul_(queries.shape[-1] ** -0.5)
            on_prefix, on_chain = grad_scores[..., :seen], grad_scores[..., seen:]
            grad_grouped = torch.einsum("hgnl,hle->hgne", on_prefix, keys[sample, :, :seen])
            grad_grouped += torch.einsum("hgnm,hnme->hgne", on_chain, chain_keys[:, chunk])
            grad_queries[:, chunk] = grad_grouped.flatten(0, 1)
            grad_keys[sample, :, :seen] += torch.einsum("hgnl,hgne->hle", on_prefix, grouped)
            grad_chain_keys[:, chunk] = torch.einsum("hgnm,hgne->hnme", on_chain, grouped)
        return (*grads, None)


def _grouped(heads: Tensor, num_kv_heads: int) -> Tensor:
    """[Q, n, E] as [H, G, n, E]."""
    return heads.unflatten(0, (num_kv_heads, -1))


def _probabilities(queries: Tensor, keys: Tensor, chain_keys: Tensor, slots: Tensor) -> Tensor:
    """[H, G, n, l + m] softmax over ``keys`` [H, l, E] up to each row's slot and its ``chain_keys`` [H, n, m, E]."""
    scaled = queries * queries.shape[-1] ** -0.5
    scores = torch.cat(
        (torch.einsum("hgne,hle->hgnl", scaled, keys), torch.einsum("hgne,hnme->hgnm", scaled, chain_keys)), dim=-1
    )
    columns = torch.arange(keys.shape[1], device=keys.device)
    scores[..., : keys.shape[1]].masked_fill_(columns > slots[:, None], -torch.inf)
    # Half-precision scores are exponentiated in float32, as fused attention kernels do.
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
