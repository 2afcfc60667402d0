"""The training objective: FOVEA's (Eq. 10-19), and with other coefficients those of all other drafters.

Legend: ``R`` supervised rows (anchor, step), ``P`` distinct teacher positions (P <= R), ``D`` hidden width,
``V`` vocabulary.

Sums are returned unnormalised, with ``Z``: the normaliser spans all ranks and micro-batches of an optimizer step.
Rows that are not supervised are left out by the caller, never masked by a factor (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.training.vocabulary_terms import Coefficients, vocabulary_terms

AlignState = Literal["corrected", "raw"]
Distance = Literal["squared", "smooth_l1"]
DecayPosition = Literal["step", "answer"]

_WEIGHTS = (
    *("lambda_hid", "lambda_kl", "lambda_tok", "lambda_l1", "lambda_rank"),
    *("beta_h", "beta_mid", "beta_ce", "beta_cmp"),
)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Coefficients of the objective; the defaults are the paper's.

    Attributes:
        lambda_hid: weight of the hidden-state alignment (Eq. 12).
        lambda_kl: weight of KL(teacher || draft) (Eq. 13).
        lambda_tok: weight of the token terms (Eq. 19).
        beta_h: weight of the final state inside the alignment.
        beta_mid: weight of the mid state inside the alignment.
        beta_ce: weight of the cross-entropy with the teacher's choice.
        beta_cmp: weight of the competitor margin.
        margin: m of Eq. 18, in logits.
        candidates: K_c; the margin is kept from the K_c-th largest competitor.
        lambda_l1: weight of the distance sum |p - q| of the probabilities (ViSpec).
        lambda_rank: weight of the likelihood of the order of the teacher's best tokens (ViSpec's ListMLE).
        ranked: tokens in that order.
        distance: of states in the alignment: ``squared`` error, or EAGLE's ``smooth_l1``; both mean over the width.
        gamma_w: decay length of the row weights exp(-(n - 1) / gamma_w), in positions n.
        align_state: ``corrected`` aligns the LM-head input, ``raw`` the state before its correction.
        position: n counts the draft ``step``, or, as the paper's text has it, the place in the ``answer``.
        chunk_rows: rows whose logits are alive at once.
    """

    lambda_hid: float = 1.0
    lambda_kl: float = 0.2
    lambda_tok: float = 1.0
    beta_h: float = 1.0
    beta_mid: float = 0.1
    beta_ce: float = 1.5
    beta_cmp: float = 0.5
    margin: float = 0.5
    candidates: int = 6
    lambda_l1: float = 0.0
    lambda_rank: float = 0.0
    ranked: int = 10
    distance: Distance = "squared"
    gamma_w: float = 1.0
    align_state: AlignState = "corrected"
    position: DecayPosition = "step"
    chunk_rows: int = 128

    def __post_init__(self) -> None:
        for name in _WEIGHTS:
            if not getattr(self, name) >= 0:
                raise ValueError(f"objective.{name} is {getattr(self, name)}; loss weights must be 0 or more")
        for name in ("candidates", "ranked", "chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"objective.{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.gamma_w > 0:
            raise ValueError(f"objective.gamma_w is {self.gamma_w}; a decay length must be above 0")
        for name, choices in (("align_state", AlignState), ("position", DecayPosition), ("distance", Distance)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"objective.{name} is {getattr(self, name)!r}; choose from {get_args(choices)}")


@dataclass(frozen=True)
class ObjectiveSums:
    """Weighted sums over the rows of one micro-batch; those of several add up, and L = sum of losses / sum of Z.

    Attributes:
        loss_sum: scalar, the sum to backpropagate; its lambdas and betas are applied.
        Z: scalar, sum of the row weights.
        hid, mid, kl, ce, cmp, l1, rank: scalars, the terms alone, without lambda and beta, detached; zero where a
            term that costs a pass of its own (mid, l1, rank) has no weight.
        agrees: [R] bool, the draft's best token is the teacher's choice.
    """

    loss_sum: Tensor
    Z: Tensor
    hid: Tensor
    mid: Tensor
    kl: Tensor
    ce: Tensor
    cmp: Tensor
    l1: Tensor
    rank: Tensor
    agrees: Tensor


def row_weights(n: Tensor, gamma_w: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights exp(-(n - 1) / gamma_w) of rows at 1-based positions ``n`` [R] (Eq. 10)."""
    return torch.exp((1 - n).to(dtype) / gamma_w)


def objective(
    h_hat: Tensor,
    h_mid: Tensor,
    step: Tensor,
    teacher_index: Tensor,
    teacher: Tensor,
    teacher_mid: Tensor,
    lm_head_weight: Tensor,
    config: ObjectiveConfig,
    *,
    h_raw: Tensor | None = None,
    answer_position: Tensor | None = None,
    draft_head_weight: Tensor | None = None,
) -> ObjectiveSums:
    """Loss sums of the supervised rows; gradients reach ``h_hat``, ``h_mid`` and, where they take part, ``h_raw`` and
    ``draft_head_weight``.

    Logits are taken in the dtype of ``lm_head_weight``, as the target itself takes them, and everything after them in
    float32 or wider, also under autocast.

    Args:
        h_hat: [R, D] draft states, LM-head input.
        h_mid: [R, D] draft states to align with the mid states.
        step: [R] 1-based draft step.
        teacher_index: [R] the row's position in ``teacher``; rows may come in any order.
        teacher: [P, D] target states f.
        teacher_mid: [P, D] target mid states.
        lm_head_weight: [V, D] of the target, V >= 2, frozen; its rows of the draft vocabulary if that is smaller.
        config: coefficients.
        h_raw: [R, D] draft states without correction; needed by ``align_state="raw"`` alone.
        answer_position: [R] 1-based place in its answer of the token that the row predicts; needed by
            ``position="answer"`` alone.
        draft_head_weight: [V, D] of the drafter if it has a head of its own.
    """
    n = step if config.position == "step" else answer_position
    aligned = h_hat if config.align_state == "corrected" else h_raw
    if n is None:
        raise ValueError("objective.position=answer needs answer_position")
    if aligned is None:
        raise ValueError("objective.align_state=raw needs h_raw")
    weights = row_weights(n, config.gamma_w, torch.promote_types(h_hat.dtype, torch.float32))
    hid = _distance_sum(config.distance, aligned, teacher, teacher_index, weights)
    mid = weights.new_zeros(())
    if config.lambda_hid * config.beta_mid:
        mid = _distance_sum(config.distance, h_mid, teacher_mid, teacher_index, weights)
    vocabulary = vocabulary_terms(
        h_hat,
        teacher,
        lm_head_weight,
        weights,
        teacher_index,
        coefficients=Coefficients(
            kl=config.lambda_kl,
            ce=config.lambda_tok * config.beta_ce,
            cmp=config.lambda_tok * config.beta_cmp,
            l1=config.lambda_l1,
            rank=config.lambda_rank,
        ),
        margin=config.margin,
        candidates=config.candidates,
        ranked=config.ranked,
        chunk_rows=config.chunk_rows,
        draft_head_weight=draft_head_weight,
    )
    return ObjectiveSums(
        loss_sum=config.lambda_hid * (config.beta_h * hid + config.beta_mid * mid) + vocabulary.loss,
        Z=weights.sum(),
        hid=hid.detach(),
        mid=mid.detach(),
        **vocabulary.sums,
        agrees=vocabulary.agrees,
    )


def _distance_sum(kind: Distance, student: Tensor, teacher: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over rows of the distance of states, mean over the width (Eq. 11, 12; EAGLE's with beta 1)."""
    student, teacher = student.to(weights.dtype), teacher[index].to(weights.dtype)
    distance = F.mse_loss if kind == "squared" else F.smooth_l1_loss
    return (distance(student, teacher, reduction="none").mean(-1) * weights).sum()
