"""Gated correction of draft states by retrieved evidence (FOVEA, Eq. 4, 8 and 9).

Legend: ``R`` rows (draft nodes), ``N`` memory entries, ``D`` hidden width, ``H`` width of the correction.

A corrected state is only scored with. Neither the context of a node nor its cache knows of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.visual.memory import VisualMemory
from fovea.visual.retrieval import RetrievalConfig, Retrieved, retrieve


class EvidenceCorrection(nn.Module):
    """``h + g c`` with ``c = f([h; r])`` and ``g = sigmoid(gate([h; r]))``, r being the evidence that h retrieves.

    f and the gate are biased two-layer perceptrons with SiLU. Their first layers are one matrix, ``mixed``: rows
    [0, H) belong to f, rows [H, 2H) to the gate. The last layer of f starts at zero, so an untrained correction
    changes nothing.

    Args:
        width: D.
        hidden_width: H.
        depths: rows of the depth embedding, D_tree + 1.
        max_depth: deepest tree depth that is corrected; -1 for none.
        config: the retrieval rule.
        use_gate: without it g is 1.
        use_depth_embedding: without it all depths ask alike.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        depths: int,
        max_depth: int,
        config: RetrievalConfig,
        use_gate: bool = True,
        use_depth_embedding: bool = True,
    ) -> None:
        super().__init__()
        self.max_depth = max_depth
        self.config = config
        self.memory_norm = nn.LayerNorm(width, eps=1e-5)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.query_norm = nn.LayerNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.depth_embedding = nn.Parameter(torch.zeros(depths, width)) if use_depth_embedding else None
        self.mixed = nn.Linear(2 * width, (1 + use_gate) * hidden_width)
        self.shift = nn.Linear(hidden_width, width)
        self.gate = nn.Linear(hidden_width, 1) if use_gate else None
        nn.init.zeros_(self.shift.weight)
        nn.init.zeros_(self.shift.bias)

    def remember(
        self, visual: Tensor, valid: Tensor | None = None, generator: torch.Generator | None = None
    ) -> VisualMemory:
        """The memory of ``visual`` [N, D]: ``k = W_K LN(v)``, ``u = W_U LN(v)``, and what scores need of k.

        What entries that are not ``valid`` [N] hold does not matter. Without a ``generator``, draws of ``random`` start
        at the config's seed.
        """
        if valid is not None:
            visual = visual.masked_fill(~valid[:, None], 0.0)
        if generator is None and self.config.mode == "random":
            generator = torch.Generator().manual_seed(self.config.seed)
        normed = self.memory_norm(visual)
        keys = self.key(normed)
        readers = keys @ self.query.weight * keys.shape[-1] ** -0.5
        return VisualMemory(
            readers=readers,
            depth_scores=None if self.depth_embedding is None else F.linear(self.depth_embedding, readers),
            values=self.value(normed),
            key_norms=keys.detach().norm(dim=-1) if self.config.mode == "static_image" else None,
            valid=valid,
            generator=generator,
        )

    def forward(
        self, h: Tensor, depth: int | Tensor, memory: VisualMemory, root: Tensor | None = None
    ) -> tuple[Tensor, Retrieved | None]:
        """States [R, D] to be normed and scored, and what the corrected rows retrieved (None if there are none).

        Rows at a depth without correction, and all rows if the memory is empty, come back as they are: the correction
        is skipped, since f([h; 0]) is not zero.

        Args:
            h: [R, D] block outputs before the final norm.
            depth: tree depth of all rows, or [R] of each.
            memory: what to retrieve from.
            root: [R or 1, N] bool, the selection of each row's root; read by ``once_per_block`` below the root.
        """
        if len(memory) == 0:
            return h, None
        if isinstance(depth, int):
            if depth > self.max_depth:
                return h, None
            return self._correct(h, depth, memory, root)
        (rows,) = torch.nonzero(depth <= self.max_depth, as_tuple=True)
        if len(rows) == 0:
            return h, None
        if memory.valid is not None and memory.valid.dim() == 2:
            memory = replace(memory, valid=memory.valid[rows])
        corrected, retrieved = self._correct(h[rows], depth[rows], memory, None if root is None else root[rows])
        return h.index_copy(0, rows, corrected.to(h.dtype)), retrieved

    def _correct(
        self, h: Tensor, depth: int | Tensor, memory: VisualMemory, root: Tensor | None
    ) -> tuple[Tensor, Retrieved]:
        retrieved = self.retrieve(h, depth, memory, root)
        readout = retrieved.alpha.to(memory.values.dtype) @ memory.values
        shifted = h + self.shift_of(h, readout)
        if memory.valid is None:
            return shifted, retrieved
        return torch.where((retrieved.k > 0)[:, None], shifted, h), retrieved

    def retrieve(self, h: Tensor, depth: int | Tensor, memory: VisualMemory, root: Tensor | None = None) -> Retrieved:
        """The evidence of ``h`` [R, D]; the memory holds at least one entry."""
        mode = self.config.mode
        scores = self.scores_of(h, depth, memory)
        ranking = None
        if mode == "random":
            # Drawn on the host, so that a seed selects the same entries on every device.
            ranking = torch.rand(scores.shape, generator=memory.generator).to(scores.device)
        elif mode == "static_image" and memory.key_norms is not None:
            ranking = memory.key_norms.expand_as(scores)
        reuse = root.expand_as(scores) if root is not None and mode == "once_per_block" else None
        return retrieve(scores, self.config, valid=memory.valid, ranking=ranking, reuse=reuse)

    def scores_of(self, h: Tensor, depth: int | Tensor, memory: VisualMemory) -> Tensor:
        """[R, N] ``W_Q (LN(h) + E_dep[depth]) k / sqrt(d)`` (Eq. 4), float32 or wider; a control leaves out a term."""
        by_depth = None if memory.depth_scores is None else memory.depth_scores[depth]
        if self.config.mode == "query_agnostic":
            scores = h.new_zeros(()) if by_depth is None else by_depth
            scores = scores.expand(h.shape[0], len(memory))
        elif by_depth is None or self.config.mode == "state_only":
            scores = F.linear(self.query_norm(h), memory.readers)
        else:
            scores = torch.addmm(by_depth, self.query_norm(h), memory.readers.t())
        return scores.float() if scores.element_size() < 4 else scores

    def shift_of(self, h: Tensor, readout: Tensor) -> Tensor:
        """[R, D] ``g c`` (Eq. 8) of states [R, D] and their evidence [R, D]."""
        mixed = F.silu(self.mixed(torch.cat((h, readout), dim=-1)))
        if self.gate is None:
            return self.shift(mixed)
        shift, gate = mixed.chunk(2, dim=-1)
        return self.shift(shift) * self.gate(gate).sigmoid()
