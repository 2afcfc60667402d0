"""How much a target attends to each of its visual tokens (DREAM's visual subsampling).

Legend: ``B`` conversations, ``T`` tokens, ``N`` visual tokens, ``H`` query heads, ``K`` key-value heads,
``E`` head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.targets.attention import causal_attention_paid, causal_attention_received


def visual_importance(
    query_HTE: Tensor, key_KTE: Tensor, scale: float, is_visual_T: Tensor, supervised_T: Tensor
) -> Tensor:
    """[N] float32 attention that a visual token receives, averaged over heads and queries.

    The queries of a token are those from the first visual token of its turn to the end of the prompt: the position
    that predicts the next answer's first token. The published code averages over the answer as well, which a prompt
    does not have yet; so training and decoding give a token the same importance, and no later turn changes it.

    Args:
        query_HTE: of the last layer, rotary embedding applied.
        key_KTE: likewise.
        scale: of their products.
        is_visual_T: bool, places of the visual tokens.
        supervised_T: bool, positions whose next token belongs to an answer.
    """
    (places_N,) = is_visual_T.nonzero(as_tuple=True)
    end = len(is_visual_T) - 1
    (answered,) = supervised_T.nonzero(as_tuple=True)
    ends = torch.cat((answered, answered.new_tensor([end])))
    turns = ends[torch.searchsorted(answered, places_N)]
    out = []
    for last in turns.unique_consecutive().tolist():
        columns = places_N[turns == last]
        rows = torch.arange(int(columns[0]), last + 1, device=columns.device)
        seen = (query_HTE[:, : last + 1], key_KTE[:, : last + 1])
        out.append(causal_attention_received(*seen, scale, rows, columns))
    return torch.cat(out) if out else torch.zeros(0, device=query_HTE.device)


class ImportanceProbe:
    """Sees the attention of the last layer of a pass, and computes importance from it when it is asked for.

    Args:
        is_visual_BT: bool, padded on the right.
        supervised_BT: likewise.
        lengths: tokens of each conversation.
    """

    def __init__(self, is_visual_BT: Tensor, supervised_BT: Tensor, lengths: Sequence[int]) -> None:
        self._masks = [
            (is_visual[:length], supervised[:length])
            for is_visual, supervised, length in zip(is_visual_BT, supervised_BT, lengths, strict=True)
        ]
        self._seen: tuple[Tensor, Tensor, float] | None = None

    def __call__(self, query_BHTE: Tensor, key_BKTE: Tensor, scale: float) -> None:
        """The attention function calls it, see :data:`fovea.targets.attention.AttentionProbe`."""
        self._seen = query_BHTE, key_BKTE, scale

    def importance(self, row: int = 0) -> Tensor:
        """[N] float32 of the conversation ``row``."""
        assert self._seen is not None
        query_BHTE, key_BKTE, scale = self._seen
        return visual_importance(query_BHTE[row], key_BKTE[row], scale, *self._masks[row])

    def visual_attention(self, rows: Tensor, row: int = 0) -> Tensor:
        """[R, N] float32 attention of the tokens at places ``rows`` [R] to each visual token, averaged over heads."""
        assert self._seen is not None
        query_BHTE, key_BKTE, scale = self._seen
        (columns_N,) = self._masks[row][0].nonzero(as_tuple=True)
        return causal_attention_paid(query_BHTE[row], key_BKTE[row], scale, rows, columns_N)
