"""KL, cross-entropy and competitor margin (Eq. 13-18), fused: value and gradient, one chunk of logits at a time.

Legend: ``R`` rows, ``P`` distinct teacher positions, ``D`` hidden width, ``V`` vocabulary; inside a chunk ``C`` rows
and ``P`` positions.

Draft logits [R, V] and teacher logits [P, V] would be the largest tensors of a training step. Here the forward pass
also computes the gradient of a chunk of rows before it looks at the next chunk, so no more than one chunk of logits is
ever alive and the backward pass only scales. Teacher logits are computed once per position, and shared by all rows
that this position teaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fovea.decoding.selection import greedy

#: Vocabulary entries whose teacher logits and probabilities are both in memory at a time.
_SLICE = 16_384


class VocabularyTerms(NamedTuple):
    """Sums over the rows, each row times its weight.

    Attributes:
        loss: scalar, the three terms times their coefficients; differentiable.
        kl, ce, cmp: scalars, the terms alone; not differentiable.
        agrees: [R] bool, the draft's best token is the teacher's choice.
    """

    loss: Tensor
    kl: Tensor
    ce: Tensor
    cmp: Tensor
    agrees: Tensor


def vocabulary_terms(
    states: Tensor,
    teacher: Tensor,
    lm_head_weight: Tensor,
    weights: Tensor,
    teacher_index: Tensor,
    *,
    coefficients: tuple[float, float, float],
    margin: float,
    candidates: int,
    chunk_rows: int,
) -> VocabularyTerms:
    """Weighted sums of the three terms; the gradient reaches ``states`` alone.

    Logits are taken in the dtype of ``lm_head_weight``, as the target takes its own, and all behind them in the dtype
    of ``weights``, also under autocast.

    Args:
        states: [R, D] draft states, LM-head input.
        teacher: [P, D] target states f.
        lm_head_weight: [V, D], V >= 2.
        weights: [R], float32 or wider.
        teacher_index: [R] row of ``teacher`` that teaches each draft state, in any order.
        coefficients: of KL, cross-entropy and margin term in ``loss``.
        margin: logits by which the teacher's choice should lead the competitor.
        candidates: K_c, the competitor is the K_c-th largest logit but for the choice's; if there are fewer, the
            smallest.
        chunk_rows: most rows in a chunk, unless one teacher position alone has more.
    """
    terms = _Terms(coefficients, margin, min(candidates, lm_head_weight.shape[0] - 1))
    loss, sums, agrees = _Fused.apply(states, teacher, lm_head_weight, weights, teacher_index, terms, chunk_rows)
    kl, ce, cmp = sums.unbind()
    return VocabularyTerms(loss, kl, ce, cmp, agrees)


@dataclass(frozen=True)
class _Terms:
    coefficients: tuple[float, float, float]
    margin: float
    candidates: int


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        teacher: Tensor,
        lm_head_weight: Tensor,
        weights: Tensor,
        teacher_index: Tensor,
        terms: _Terms,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        agrees = torch.empty(states.shape[0], dtype=torch.bool, device=states.device)
        sums = weights.new_zeros(3)
        used, shared, counts = torch.unique(teacher_index, return_inverse=True, return_counts=True)
        order = torch.argsort(shared, stable=True)
        chunks = list(_chunks(counts.tolist(), chunk_rows))
        largest = max((rows.stop - rows.start for rows, _ in chunks), default=0)
        evaluate = _ChunkEvaluator(lm_head_weight, largest, weights.dtype, terms)
        with torch.autocast(states.device.type, enabled=False):
            for row_slice, position_slice in chunks:
                rows, positions = order[row_slice], used[position_slice]
                index = shared[rows] - position_slice.start
                chunk = evaluate(states[rows], teacher[positions], index, want_gradient=grad is not None)
                sums += weights[rows] @ chunk.terms
                agrees[rows] = chunk.agrees
                if grad is not None and chunk.gradient is not None:
                    grad[rows] = (chunk.gradient * weights[rows, None]).to(grad.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(sums, agrees)
        return sums @ sums.new_tensor(terms.coefficients), sums, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None, None


def _chunks(rows_of_position: Sequence[int], limit: int) -> Iterator[tuple[slice, slice]]:
    """Cuts rows, sorted by position, between positions: at most ``limit`` rows and at least one position each."""
    first_row = first_position = rows = 0
    for position, count in enumerate(rows_of_position):
        if rows and rows + count > limit:
            yield slice(first_row, first_row + rows), slice(first_position, position)
            first_row, first_position, rows = first_row + rows, position, 0
        rows += count
    if rows:
        yield slice(first_row, first_row + rows), slice(first_position, len(rows_of_position))


@dataclass(frozen=True)
class _Chunk:
    """Rows that are not yet weighted: terms [C, 3] (kl, ce, cmp), top-1 agreement [C], gradient [C, D]."""

    terms: Tensor
    agrees: Tensor
    gradient: Tensor | None


class _ChunkEvaluator:
    """Evaluates chunks in one [2 C, V] buffer that it reuses: fresh pages for each cost more than the arithmetic.

    Its first half takes the draft's logits, its second half the teacher's, so that one product makes both.
    """

    def __init__(self, weight_VD: Tensor, rows: int, dtype: torch.dtype, terms: _Terms) -> None:
        self.weight_VD = weight_VD
        self.terms = terms
        self._buffer = torch.empty(2 * rows, weight_VD.shape[0], dtype=dtype, device=weight_VD.device)

    def __call__(self, draft_CD: Tensor, teacher_PD: Tensor, index_C: Tensor, *, want_gradient: bool) -> _Chunk:
        """``index_C`` is each row's position in ``teacher_PD``."""
        z_CV, teacher_PV = self._project(torch.cat((draft_CD, teacher_PD))).split((len(draft_CD), len(teacher_PD)))
        choice_P = greedy(teacher_PV)
        negative_entropy_P = _softmax_(teacher_PV, teacher_PV.gather(1, choice_P[:, None]))
        p_CV = self._spread(teacher_PV, index_C)
        choice_C = choice_P[index_C, None]

        z_choice_C = z_CV.gather(1, choice_C)
        rivals = z_CV.scatter_(1, choice_C, -torch.inf).topk(self.terms.candidates)
        z_CV.scatter_(1, choice_C, z_choice_C)
        competitor_C, z_competitor_C = rivals.indices[:, -1:], rivals.values[:, -1:]
        z_best_C = torch.maximum(z_choice_C, rivals.values[:, :1])
        deficit_C = self.terms.margin - (z_choice_C - z_competitor_C)

        z_CV.sub_(z_best_C)
        cross_C = torch.einsum("cv,cv->c", p_CV, z_CV)[:, None]
        exp_CV = z_CV.exp_()
        sum_C = exp_CV.sum(-1, keepdim=True)
        lse_C = sum_C.log()
        kl_C = negative_entropy_P[index_C, None] - cross_C + lse_C
        ce_C = lse_C - (z_choice_C - z_best_C)
        gradient_CD = None
        if want_gradient:
            gradient_CD = self._gradient(exp_CV, sum_C, p_CV, choice_C, competitor_C, deficit_C)
        return _Chunk(
            terms=torch.cat([kl_C, ce_C, F.softplus(deficit_C)], dim=1),
            agrees=(z_choice_C == z_best_C)[:, 0],
            gradient=gradient_CD,
        )

    def _project(self, states_ND: Tensor) -> Tensor:
        """Logits [N, V] in the LM head's dtype, widened into the buffer."""
        states_ND, out_NV = states_ND.to(self.weight_VD.dtype), self._buffer[: len(states_ND)]
        if out_NV.dtype == self.weight_VD.dtype:
            return torch.mm(states_ND, self.weight_VD.T, out=out_NV)
        return out_NV.copy_(states_ND @ self.weight_VD.T)

    def _spread(self, p_PV: Tensor, index_C: Tensor) -> Tensor:
        """[C, V] rows ``index_C``, ascending and none left out, of the teacher's probabilities in the second half."""
        if len(p_PV) == len(index_C):
            return p_PV
        rows = len(index_C)
        return torch.index_select(p_PV.clone(), 0, index_C, out=self._buffer[rows : 2 * rows])

    def _gradient(
        self,
        exp_CV: Tensor,
        sum_C: Tensor,
        p_CV: Tensor,
        choice_C: Tensor,
        competitor_C: Tensor,
        deficit_C: Tensor,
    ) -> Tensor:
        """[C, D] gradient for the draft states; overwrites ``exp_CV``, which over ``sum_C`` is the draft's q.

        With the coefficients named by their terms and s = sigmoid(deficit), the gradient for the logits is
        (kl + ce) q - kl p - (ce + cmp s) 1_choice + cmp s 1_competitor.
        """
        kl, ce, cmp = self.terms.coefficients
        slope_C = cmp * deficit_C.sigmoid()
        grad_CV = exp_CV.mul_((kl + ce) / sum_C).sub_(p_CV, alpha=kl)
        grad_CV.scatter_add_(1, choice_C, -(slope_C + ce)).scatter_add_(1, competitor_C, slope_C)
        return (grad_CV.to(self.weight_VD.dtype) @ self.weight_VD).to(grad_CV.dtype)


def _softmax_(logits_PV: Tensor, best_P: Tensor) -> Tensor:
    """Probabilities in place of logits with row maxima ``best_P`` [P, 1]; returns sum p log p of each row, [P].

    Both logits and exponentials are needed for that sum, so it is taken slice by slice.
    """
    logits_PV.sub_(best_P)
    total_P, weighted_P = logits_PV.new_zeros(2, len(logits_PV))
    for logits in logits_PV.split(_SLICE, dim=1):
        exp = logits.exp()
        total_P += exp.sum(-1)
        weighted_P += torch.einsum("pv,pv->p", exp, logits)
        logits.copy_(exp)
    logits_PV.div_(total_P[:, None])
    return weighted_P / total_P - total_P.log()
