"""The terms over the vocabulary, fused: value and gradient, one chunk of logits at a time.

KL, cross-entropy and competitor margin are FOVEA's (Eq. 13-18); the distance of probabilities and the ranking
likelihood are ViSpec's.

Legend: ``R`` rows, ``P`` distinct teacher positions, ``D`` hidden width, ``V`` (draft) vocabulary; inside a chunk ``C``
rows and ``P`` positions.

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


class Coefficients(NamedTuple):
    """What each term counts in the loss."""

    kl: float = 0.0
    ce: float = 0.0
    cmp: float = 0.0
    l1: float = 0.0
    rank: float = 0.0


class VocabularyTerms(NamedTuple):
    """Sums over the rows, each row times its weight.

    Attributes:
        loss: scalar, the terms times their coefficients; differentiable.
        sums: the terms alone, each a scalar, not differentiable; zero where the coefficient of ``l1`` or ``rank`` is.
        agrees: [R] bool, the draft's best token is the teacher's choice.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    agrees: Tensor


def vocabulary_terms(
    states: Tensor,
    teacher: Tensor,
    lm_head_weight: Tensor,
    weights: Tensor,
    teacher_index: Tensor,
    *,
    coefficients: Coefficients,
    margin: float,
    candidates: int,
    ranked: int = 10,
    chunk_rows: int,
    draft_head_weight: Tensor | None = None,
) -> VocabularyTerms:
    """Weighted sums of the terms; the gradient reaches ``states`` and a ``draft_head_weight`` that is trained.

    With p the teacher's and q the draft's probabilities and y the teacher's choice: ``kl`` is KL(p || q), ``ce``
    -log q(y), ``cmp`` softplus(margin - lead of y over the competitor), ``l1`` sum |p - q|, and ``rank`` the negative
    log-likelihood (Plackett-Luce, ListMLE) of the order of the teacher's ``ranked`` best tokens under the draft's
    logits of these tokens.

    Logits are taken in the dtype of the heads' weights, as the target takes its own, and all behind them in the dtype
    of ``weights``, also under autocast.

    Args:
        states: [R, D] draft states, LM-head input.
        teacher: [P, D] target states f.
        lm_head_weight: [V, D] of the teacher, V >= 2; its rows of the draft vocabulary if that is smaller.
        weights: [R], float32 or wider.
        teacher_index: [R] row of ``teacher`` that teaches each draft state, in any order.
        coefficients: of the terms in ``loss``.
        margin: logits by which the teacher's choice should lead the competitor.
        candidates: K_c, the competitor is the K_c-th largest logit but for the choice's; if there are fewer, the
            smallest.
        ranked: tokens whose order counts, at most V.
        chunk_rows: most rows in a chunk, unless one teacher position alone has more.
        draft_head_weight: [V, D] of the drafter if it has a head of its own.
    """
    entries = lm_head_weight.shape[0]
    terms = _Terms(Coefficients(*coefficients), margin, min(candidates, entries - 1), min(ranked, entries))
    loss, sums, agrees = _Fused.apply(
        states, teacher, lm_head_weight, draft_head_weight, weights, teacher_index, terms, chunk_rows
    )
    return VocabularyTerms(loss, dict(zip(Coefficients._fields, sums.unbind(), strict=True)), agrees)


@dataclass(frozen=True)
class _Terms:
    coefficients: Coefficients
    margin: float
    candidates: int
    ranked: int


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        teacher: Tensor,
        lm_head_weight: Tensor,
        draft_head_weight: Tensor | None,
        weights: Tensor,
        teacher_index: Tensor,
        terms: _Terms,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        head_grad = torch.zeros_like(draft_head_weight) if ctx.needs_input_grad[3] else None  # type: ignore[arg-type]
        agrees = torch.empty(states.shape[0], dtype=torch.bool, device=states.device)
        sums = weights.new_zeros(len(Coefficients._fields))
        used, shared, counts = torch.unique(teacher_index, return_inverse=True, return_counts=True)
        order = torch.argsort(shared, stable=True)
        chunks = list(_chunks(counts.tolist(), chunk_rows))
        largest = max((rows.stop - rows.start for rows, _ in chunks), default=0)
        evaluate = _ChunkEvaluator(lm_head_weight, draft_head_weight, largest, weights.dtype, terms)
        with torch.autocast(states.device.type, enabled=False):
            for row_slice, position_slice in chunks:
                rows, positions = order[row_slice], used[position_slice]
                index = shared[rows] - position_slice.start
                chunk = evaluate(states[rows], teacher[positions], index, want_gradient=grad is not None)
                sums += weights[rows] @ chunk.terms
                agrees[rows] = chunk.agrees
                if grad is not None and chunk.logit_gradient is not None:
                    grad_CV = chunk.logit_gradient.mul_(weights[rows, None]).to(evaluate.draft_VD.dtype)
                    grad[rows] = (grad_CV @ evaluate.draft_VD).to(grad.dtype)
                    if head_grad is not None:
                        head_grad.addmm_(grad_CV.T.to(head_grad.dtype), states[rows].to(head_grad.dtype))
        ctx.save_for_backward(grad, head_grad)
        ctx.mark_non_differentiable(sums, agrees)
        return sums @ sums.new_tensor(terms.coefficients), sums, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_head = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return of_states, None, None, of_head, None, None, None, None


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
    """Rows that are not yet weighted: terms [C, 5], top-1 agreement [C], gradient for the logits [C, V] if wanted."""

    terms: Tensor
    agrees: Tensor
    logit_gradient: Tensor | None


class _ChunkEvaluator:
    """Evaluates chunks in one [2 C, V] buffer that it reuses: fresh pages for each cost more than the arithmetic.

    Its first half takes the draft's logits, its second half the teacher's; with one head, one product makes both.
    """

    def __init__(
        self, teacher_VD: Tensor, draft_VD: Tensor | None, rows: int, dtype: torch.dtype, terms: _Terms
    ) -> None:
        self.teacher_VD = teacher_VD
        self.draft_VD = teacher_VD if draft_VD is None else draft_VD
        self.terms = terms
        self._buffer = torch.empty(2 * rows, teacher_VD.shape[0], dtype=dtype, device=teacher_VD.device)

    def __call__(self, draft_CD: Tensor, teacher_PD: Tensor, index_C: Tensor, *, want_gradient: bool) -> _Chunk:
        """``index_C`` is each row's position in ``teacher_PD``."""
        z_CV, teacher_PV = self._logits(draft_CD, teacher_PD)
        choice_P = greedy(teacher_PV)
        use = self.terms.coefficients
        order_Pn = _best(teacher_PV, self.terms.ranked) if use.rank else None
        negative_entropy_P = _softmax_(teacher_PV, teacher_PV.gather(1, choice_P[:, None]))
        p_CV = self._spread(teacher_PV, index_C)
        choice_C = choice_P[index_C, None]

        z_choice_C = z_CV.gather(1, choice_C)
        rivals = z_CV.scatter_(1, choice_C, -torch.inf).topk(self.terms.candidates)
        z_CV.scatter_(1, choice_C, z_choice_C)
        competitor_C, z_competitor_C = rivals.indices[:, -1:], rivals.values[:, -1:]
        z_best_C = torch.maximum(z_choice_C, rivals.values[:, :1])
        deficit_C = self.terms.margin - (z_choice_C - z_competitor_C)
        rank_C, rank_gradient = torch.zeros_like(deficit_C), None
        if order_Pn is not None:
            order_Cn = order_Pn[index_C]
            rank_C, slope_Cn = _list_mle(z_CV.gather(1, order_Cn))
            rank_gradient = order_Cn, slope_Cn.mul_(use.rank)

        z_CV.sub_(z_best_C)
        cross_C = torch.einsum("cv,cv->c", p_CV, z_CV)[:, None]
        exp_CV = z_CV.exp_()
        sum_C = exp_CV.sum(-1, keepdim=True)
        lse_C = sum_C.log()
        kl_C = negative_entropy_P[index_C, None] - cross_C + lse_C
        ce_C = lse_C - (z_choice_C - z_best_C)
        q_CV = exp_CV.div_(sum_C)
        l1_C = (q_CV - p_CV).abs_().sum(-1, keepdim=True) if use.l1 else torch.zeros_like(kl_C)
        gradient_CV = None
        if want_gradient:
            gradient_CV = self._gradient(q_CV, p_CV, choice_C, competitor_C, deficit_C)
            if rank_gradient is not None:
                gradient_CV.scatter_add_(1, *rank_gradient)
        return _Chunk(
            terms=torch.cat([kl_C, ce_C, F.softplus(deficit_C), l1_C, rank_C], dim=1),
            agrees=(z_choice_C == z_best_C)[:, 0],
            logit_gradient=gradient_CV,
        )

    def _logits(self, draft_CD: Tensor, teacher_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [C, V] of the draft and [P, V] of the teacher, views of the buffer."""
        rows = len(draft_CD), len(teacher_PD)
        if self.draft_VD is self.teacher_VD:
            both = self._project(torch.cat((draft_CD, teacher_PD)), self.teacher_VD, self._buffer[: sum(rows)])
            return both[: rows[0]], both[rows[0] :]
        return (
            self._project(draft_CD, self.draft_VD, self._buffer[: rows[0]]),
            self._project(teacher_PD, self.teacher_VD, self._buffer[rows[0] : sum(rows)]),
        )

    @staticmethod
    def _project(states_ND: Tensor, weight_VD: Tensor, out_NV: Tensor) -> Tensor:
        """Logits [N, V] in the head's dtype, widened into ``out_NV``."""
        states_ND = states_ND.to(weight_VD.dtype)
        if out_NV.dtype == weight_VD.dtype:
            return torch.mm(states_ND, weight_VD.T, out=out_NV)
        return out_NV.copy_(states_ND @ weight_VD.T)

    def _spread(self, p_PV: Tensor, index_C: Tensor) -> Tensor:
        """[C, V] rows ``index_C``, ascending and none left out, of the teacher's probabilities in the second half."""
        if len(p_PV) == len(index_C):
            return p_PV
        rows = len(index_C)
        return torch.index_select(p_PV.clone(), 0, index_C, out=self._buffer[rows : 2 * rows])

    def _gradient(
        self, q_CV: Tensor, p_CV: Tensor, choice_C: Tensor, competitor_C: Tensor, deficit_C: Tensor
    ) -> Tensor:
        """[C, V] gradient for the draft's logits, the ranking apart; overwrites ``q_CV``.

        With the coefficients named by their terms and s = sigmoid(deficit), it is
        (kl + ce) q - kl p - (ce + cmp s) 1_choice + cmp s 1_competitor, and for the distance of probabilities with
        t = sign(q - p) moreover l1 q (t - sum q t).
        """
        use = self.terms.coefficients
        slope_C = use.cmp * deficit_C.sigmoid()
        if use.l1:
            side_CV = (q_CV - p_CV).sign_()
            mean_C = torch.einsum("cv,cv->c", q_CV, side_CV)[:, None]
            grad_CV = q_CV.mul_(side_CV.sub_(mean_C).mul_(use.l1).add_(use.kl + use.ce))
        else:
            grad_CV = q_CV.mul_(use.kl + use.ce)
        grad_CV.sub_(p_CV, alpha=use.kl)
        return grad_CV.scatter_add_(1, choice_C, -(slope_C + use.ce)).scatter_add_(1, competitor_C, slope_C)


def _best(logits_PV: Tensor, count: int) -> Tensor:
    """[P, n] tokens of the largest logits, best first, equal ones by lower id where they are among the first n."""
    values, ids = logits_PV.topk(count)
    # A stable sort of ids, then of values, settles ties inside the selection.
    by_id = ids.argsort(dim=1)
    order = values.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, by_id).gather(1, order)


def _list_mle(z_Cn: Tensor) -> tuple[Tensor, Tensor]:
    """Negative Plackett-Luce log-likelihood [C, 1] of the given order, and its gradient [C, n] for the logits."""
    rest_Cn = z_Cn.flip(1).logcumsumexp(1).flip(1)
    # Token j is among the candidates of every place up to its own.
    share_Cn = torch.exp(z_Cn + (-rest_Cn).logcumsumexp(1))
    return (rest_Cn - z_Cn).sum(1, keepdim=True), share_Cn - 1


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
