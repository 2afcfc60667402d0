"""The part of a target that a drafter shares, frozen: input embedding, LM head and final norm weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TargetHead:
    """Embedding [V, D], LM head [V, D] (the same tensor if tied) and final norm weight [D]; no gradients.

    A plain object: kept as an attribute of a module, it enters neither its parameters nor its checkpoints.
    """

    embedding: Tensor
    lm_head_weight: Tensor
    norm_weight: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D]."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states f or of a drafter's output state."""
        return F.linear(hidden, self.lm_head_weight)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TargetHead:
        """The head on ``device``; a tied embedding stays tied."""
        embedding = self.embedding.to(device, dtype)
        tied = self.lm_head_weight is self.embedding
        lm_head = embedding if tied else self.lm_head_weight.to(device, dtype)
        return TargetHead(embedding, lm_head, self.norm_weight.to(device, dtype))
