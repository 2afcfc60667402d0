"""State-conditioned retrieval from the visual memory (FOVEA, Eq. 4-7) and its controls.

Legend: ``R`` rows (draft nodes), ``N`` memory entries, ``V`` the valid ones among them.

The cumulative-mass rule takes the best entries until their softmax mass reaches ``rho``. It never sorts the memory:
the ``k_max`` best scores decide the cardinality, and the score of the last entry taken decides the set. All of it is
exact in the presence of equal scores, where the lower index goes first, and none of it waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["mass", "topk", "dense", "random", "static_image", "query_agnostic", "state_only", "once_per_block"]
Cardinality = Literal["fixed", "mass"]


@dataclass(frozen=True)
class RetrievalConfig:
    """How a node selects its evidence.

    Attributes:
        mode: ``mass`` is the paper's rule, ``topk`` its appendix, ``dense`` takes all. The controls: ``random`` draws
            entries per node, ``static_image`` takes those of largest key norm, ``query_agnostic`` queries with the
            depth alone, ``state_only`` with the state alone, ``once_per_block`` reuses the root's selection.
        rho: softmax mass to reach, in (0, 1].
        k_min: fewest entries of a selection, if the memory has as many.
        k_max: most entries of a selection.
        k: entries of ``topk`` and of the controls.
        cardinality: whether a control takes ``k`` entries or (``mass``) as many as the rule gives its node.
        seed: of the draws of ``random``; they are the same in every request.
    """

    mode: Mode = "mass"
    rho: float = 0.8
    k_min: int = 32
    k_max: int = 256
    k: int = 16
    cardinality: Cardinality = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("mode", Mode), ("cardinality", Cardinality)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"retrieval.{name} is {getattr(self, name)!r}; choose from {get_args(choices)}")
        if not 0 < self.rho <= 1:
            raise ValueError(f"retrieval.rho is {self.rho}; a share of the softmax mass lies in (0, 1]")
        for name in ("k", "k_min"):
            if getattr(self, name) < 1:
                raise ValueError(f"retrieval.{name} is {getattr(self, name)}; a selection has at least 1 entry")
        if self.k_min > self.k_max:
            raise ValueError(f"retrieval.k_min {self.k_min} is above retrieval.k_max {self.k_max}")

    @property
    def follows_mass(self) -> bool:
        """Whether the mass rule sets the cardinality."""
        return self.mode == "mass" or (self.mode not in ("topk", "dense") and self.cardinality == "mass")


@dataclass(frozen=True)
class Retrieved:
    """The evidence of some nodes.

    Attributes:
        selected: [R, N] bool.
        alpha: [R, N] weights, renormalised over the selection (Eq. 7), 0 elsewhere; differentiable.
        k: [R] int64 entries selected.
        k_raw: [R] int64 cardinality that the mass alone asks for (Eq. 6), at most ``k_max``; -1 without the rule.
    """

    selected: Tensor
    alpha: Tensor
    k: Tensor
    k_raw: Tensor


def retrieve(
    scores: Tensor,
    config: RetrievalConfig,
    *,
    valid: Tensor | None = None,
    ranking: Tensor | None = None,
    reuse: Tensor | None = None,
) -> Retrieved:
    """Selects and weighs entries by ``scores`` [R, N], float32 or wider, N >= 1.

    Args:
        scores: q k / sqrt(d) of every entry.
        config: the rule.
        valid: [N] or [R, N] bool; None if all are. What invalid entries hold does not matter.
        ranking: [R, N] order in which entries are taken, if not that of the scores.
        reuse: [R, N] bool selection to take as it is; cardinalities are its own.
    """
    if valid is not None:
        scores = scores.masked_fill(~valid, -torch.inf)
    fixed = scores.detach()
    if reuse is not None:
        k = reuse.sum(-1)
        return Retrieved(reuse, _weights(scores, reuse, valid), k, torch.full_like(k, -1))
    if config.mode == "dense":
        selected = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.expand_as(scores)
        k = selected.sum(-1)
        return Retrieved(selected, _weights(scores, selected, valid), k, torch.full_like(k, -1))

    entries = scores.shape[-1]
    sizes = None if valid is None else valid.sum(-1).expand(scores.shape[0])
    depth = min(config.k_max if config.follows_mass else config.k, entries)
    best = fixed.topk(depth, dim=-1).values
    if config.follows_mass:
        k_raw = _mass_cardinality(fixed, best, config.rho, sizes)
        k = k_raw.clamp(min=min(config.k_min, depth))
    else:
        k = torch.full((scores.shape[0],), depth, device=scores.device)
        k_raw = torch.full_like(k, -1)
    if sizes is not None:
        k = torch.minimum(k, sizes)
    if ranking is not None:
        fixed = ranking if valid is None else ranking.masked_fill(~valid, -torch.inf)
        best = fixed.topk(depth, dim=-1).values
    selected = _first(fixed, best, k)
    return Retrieved(selected, _weights(scores, selected, valid), k, k_raw)


def _mass_cardinality(scores: Tensor, best: Tensor, rho: float, sizes: Tensor | None) -> Tensor:
    """min(K_raw, K) [R] of Eq. 6, for ``scores`` [R, N] of which ``best`` [R, K] are the highest: entries until the
    running sum of exp(s - max) reaches ``rho`` times the whole sum.

    Both sides are unnormalised: dividing first would miss sums that meet the boundary exactly. A sum that rounding
    keeps below ``rho`` ends at the last valid entry.
    """
    top = best[:, :1]
    if sizes is not None:
        top = top.masked_fill(sizes[:, None] == 0, 0.0)
    total = (scores - top).exp_().sum(-1, keepdim=True)
    running = (best - top).exp_().cumsum(-1)
    count = (running < total.mul_(rho)).sum(-1).add_(1).clamp_(max=best.shape[1])
    return count if sizes is None else torch.minimum(count, sizes)


def _first(ranking: Tensor, best: Tensor, k: Tensor) -> Tensor:
    """[R, N] bool: the ``k`` [R] entries of highest ``ranking`` [R, N], lower indices first among equals."""
    k = k.unsqueeze(-1)
    last = best.gather(-1, (k - 1).clamp_(min=0))
    reached = ranking >= last
    # Without ties at the cut that is all. A host can look; a device would have to be waited for.
    if ranking.is_cpu and torch.equal(reached.sum(-1, keepdim=True), k):
        return reached
    level = ranking == last
    above = reached & ~level
    return above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def _weights(scores: Tensor, selected: Tensor, valid: Tensor | None) -> Tensor:
    """Softmax over the selection (Eq. 7), 0 elsewhere; all 0 in a row without valid entries."""
    masked = scores.masked_fill(~selected, -torch.inf)
    if valid is None:
        return masked.softmax(-1)
    empty = ~selected.any(-1, keepdim=True)
    return masked.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
