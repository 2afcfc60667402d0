"""The attention of a target's text model: transformers' sdpa, and figures of its weights where they are asked for.

The function is registered with transformers under a name of its own. A layer call that passes ``attention_probe``
shows its queries and keys to the probe; nothing is kept on the model, and no layer ever builds its attention matrix.

Legend: ``H`` query heads, ``K`` key-value heads, ``T`` tokens, ``E`` head width, ``R`` rows and
``C`` columns asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: Name under which transformers finds :func:`probed_sdpa`.
PROBED_SDPA = "fovea_sdpa"

#: Sees queries [B, H, T, E] and keys [B, K, T, E], rotary embedding applied, and the scale of their products.
AttentionProbe = Callable[[Tensor, Tensor, float], None]

# Scores of a chunk of rows, in numbers; bounds the memory of such a figure to 64 MB.
_CHUNK_NUMBERS = 1 << 24


def probed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attention_probe: AttentionProbe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention; shows queries and keys to ``attention_probe`` first, if there is one."""
    if attention_probe is not None:
        attention_probe(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(PROBED_SDPA, probed_sdpa)
AttentionMaskInterface.register(PROBED_SDPA, sdpa_mask)


def causal_attention_entropy(query_HTE: Tensor, key_KTE: Tensor, scale: float, rows_R: Tensor) -> Tensor:
    """[R] entropy in nats of the causal attention of ``rows_R``, of each head by itself and then averaged over heads.

    That is the order of DREAM's code (entropy per head, mean of the entropies). fp32, a chunk of rows at a time.
    """
    out = [
        # exp(-inf) * -inf is not a number; a weight of zero adds nothing.
        torch.special.entr(log_weights_KGrT.exp()).sum(-1).mean((0, 1))
        for log_weights_KGrT in _causal_log_weights(query_HTE, key_KTE, scale, rows_R)
    ]
    return torch.cat(out) if out else query_HTE.new_zeros(0, dtype=torch.float32)


def causal_attention_received(
    query_HTE: Tensor, key_KTE: Tensor, scale: float, rows_R: Tensor, columns_C: Tensor
) -> Tensor:
    """[C] causal attention that ``rows_R`` pay to the tokens ``columns_C``, averaged over heads and rows.

    fp32, a chunk of rows at a time.
    """
    received_C = torch.zeros(len(columns_C), device=query_HTE.device)
    for log_weights_KGrT in _causal_log_weights(query_HTE, key_KTE, scale, rows_R):
        received_C += log_weights_KGrT[..., columns_C].exp().sum((0, 1, 2))
    return received_C / (query_HTE.shape[0] * max(1, len(rows_R)))


def causal_attention_paid(
    query_HTE: Tensor, key_KTE: Tensor, scale: float, rows_R: Tensor, columns_C: Tensor
) -> Tensor:
    """[R, C] causal attention that each of ``rows_R`` pays to each of ``columns_C``, averaged over heads; fp32."""
    out = [
        log_weights_KGrT[..., columns_C].exp().mean((0, 1))
        for log_weights_KGrT in _causal_log_weights(query_HTE, key_KTE, scale, rows_R)
    ]
    return torch.cat(out) if out else torch.zeros(0, len(columns_C), device=query_HTE.device)


def _causal_log_weights(query_HTE: Tensor, key_KTE: Tensor, scale: float, rows_R: Tensor) -> Iterator[Tensor]:
    """[K, H / K, r, T] logarithms of the attention of ``rows_R``, a chunk of rows at a time."""
    heads, tokens, width = query_HTE.shape
    groups = key_KTE.shape[0]
    key_KET = key_KTE.float().transpose(1, 2)
    columns_T = torch.arange(tokens, device=rows_R.device)
    for chunk_r in rows_R.split(max(1, _CHUNK_NUMBERS // (heads * tokens))):
        query_KGrE = query_HTE[:, chunk_r].float().view(groups, heads // groups, -1, width)
        scores_KGrT = (query_KGrE @ key_KET[:, None]) * scale
        yield scores_KGrT.masked_fill(columns_T > chunk_r[:, None], -torch.inf).log_softmax(-1)
