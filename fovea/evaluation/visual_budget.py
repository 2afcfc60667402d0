"""How much of its pictures a drafter needs: every iteration drafted under several visual budgets (FOVEA, Appendix A).

The target answers as always, with a drafter that sees everything. At every iteration the same drafter also drafts from
the same committed text under each smaller budget: of the picture it then has the k(r) visual tokens alone that the
target's last layer attends to most, in its context and in what it retrieves from. What the target would accept of those
trees is known as soon as the answer is, because greedy verification follows the answer: so a budget costs its drafting
and no pass of the target.

Legend: ``I`` iterations, ``R`` budgets, ``T`` steps of the answer, ``N`` visual tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.decoding.growth import TreeConfig
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.decoding.tree import DraftTree
from fovea.decoding.verify import verify
from fovea.drafters.base import Drafter
from fovea.drafters.interfaces import proposer_for
from fovea.drafters.proposer import NeuralProposer
from fovea.evaluation.budget_results import BudgetResult, BudgetSample
from fovea.evaluation.prompts import UnreadablePrompt, encode_prompt, user_turns
from fovea.targets.base import Encoded, Prefill, Target
from fovea.targets.conversation import Conversation
from fovea.visual.budget import restricted, within_budget


@dataclass(frozen=True)
class BudgetConfig:
    """Which budgets are compared; the defaults are the paper's.

    Attributes:
        ratios: shares of the visual tokens, ascending, the last one 1: the answer is decoded with full access.
        low: the budget that may be under- or over-supplied (Eq. 23 to 25), one of ``ratios``.
        high: the budget that it is compared with, likewise.
        focus_tokens: visual tokens of the target's focus at a step (Eq. 29).
    """

    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    low: float = 0.25
    high: float = 0.75
    focus_tokens: int = 16

    def __post_init__(self) -> None:
        ratios = self.ratios
        if not ratios or ratios[-1] != 1 or not ratios[0] >= 0 or list(ratios) != sorted(set(ratios)):
            raise ValueError(f"ratios is {list(ratios)}; give ascending shares from 0 to 1, the last one 1")
        for name in ("low", "high"):
            if getattr(self, name) not in ratios:
                raise ValueError(f"{name} is {getattr(self, name)}; choose one of the ratios {list(ratios)}")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must be below high")
        if self.focus_tokens < 1:
            raise ValueError(f"focus_tokens is {self.focus_tokens}; a focus has at least 1 visual token")


class BudgetedProposer:
    """Decodes with full access and drafts under every other budget beside it.

    Args:
        proposers: one for each of ``ratios``, all with the same drafter and tree.
        ratios: the budgets; the last one is 1.
    """

    def __init__(self, proposers: Sequence[NeuralProposer], ratios: Sequence[float]) -> None:
        self.proposers = list(proposers)
        self.ratios = list(ratios)
        self.full = self.proposers[-1]
        self.max_drafts = self.full.max_drafts
        self.feature_layers = self.full.feature_layers

    def start(self, prefill: Prefill) -> None:
        #: Per iteration, the place in the answer of the first token drafted, and the trees of all budgets.
        self.iterations: list[tuple[int, list[DraftTree]]] = []
        #: Per iteration, what the root retrieved with full access; nothing where the drafter retrieves nothing.
        self.retrieved: list[list[int]] = []
        self._committed = 0
        importance = importance_of(prefill)
        for ratio, proposer in zip(self.ratios, self.proposers, strict=True):
            kept = within_budget(importance, prefill.is_visual, ratio)
            proposer.start(restricted(prefill, kept, states_leave=proposer.drafter.states_leave))

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self._committed += len(tokens)
        for proposer in self.proposers:
            proposer.commit(tokens, states)

    def propose(self) -> DraftTree:
        trees = [proposer.propose() for proposer in self.proposers]
        self.iterations.append((self._committed, trees))
        if self.full.evidence:
            self.retrieved.append(self.full.evidence[0].selected[0].nonzero()[:, 0].tolist())
        return trees[-1]

    def accepted(self, answer: Sequence[int]) -> list[list[int]]:
        """[I][R] draft tokens that the target accepted, or would have, on its way to ``answer``; no bonus."""
        return [[accepted_drafts(tree, answer[place:]) for tree in trees] for place, trees in self.iterations]


def accepted_drafts(tree: DraftTree, continuation: Sequence[int]) -> int:
    """Draft tokens of ``tree`` that a target accepts which continues with ``continuation``, at least one token."""
    drafts = tree.drafts
    depths = drafts.depths.tolist()

    def choose(row: int) -> int:
        return continuation[depths[row]] if depths[row] < len(continuation) else -1

    return verify(drafts, choose, (), remaining=len(continuation)).accepted


def importance_of(prefill: Prefill) -> Tensor:
    """[N] float32 importance of the visual tokens.

    Raises:
        ValueError: the target does not give it.
    """
    if prefill.importance is None:
        raise ValueError(
            "diagnostics=budget ranks visual tokens by how much the target attends to them, and this target does not "
            "say; let its prefill give importance (see fovea/targets/importance.py), or leave diagnostics out"
        )
    return prefill.importance()


def require_visual(target: Target, prompts: Sequence[Conversation], max_new_tokens: int) -> None:
    """Refuses in seconds what cannot be measured.

    Raises:
        ValueError: no prompt has a picture, or the target does not say what it attends to.
    """
    for conversation in prompts:
        if not conversation.images:
            continue
        first = next(turn for turn in user_turns(conversation) if turn.images)
        if len(user_turns(first)) > 1:
            return  # its earlier turns must be answered first
        try:
            encoded = encode_prompt(target, first, [], max_new_tokens)
        except UnreadablePrompt:
            continue
        importance_of(target.prefill(encoded, 1)[1])
        return
    raise ValueError(
        f"diagnostics=budget needs questions about pictures, and none of the {len(prompts)} prompts is one; choose "
        "another benchmark, or leave diagnostics out"
    )


@torch.inference_mode()
def measure_budgets(
    target: Target,
    drafter: Drafter,
    tree: TreeConfig,
    prompts: Sequence[Conversation],
    config: BudgetConfig,
    *,
    max_new_tokens: int,
    selection: Selection = GREEDY,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BudgetResult:
    """Answers ``prompts``, every iteration drafted under every budget.

    Prompts without a picture have no budget: they are counted, and answered only if a later turn of the conversation
    follows on them. Those that cannot be read are named with the reason.

    Raises:
        ValueError: the target does not say what it attends to.
    """
    seat = BudgetedProposer([proposer_for(drafter, tree) for _ in config.ratios], config.ratios)
    result = BudgetResult([], [], {}, asdict(config) | dict(settings or {}))
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "selection": selection}
    for number, conversation in enumerate(prompts):
        answers: list[list[int]] = []
        turns = user_turns(conversation)
        try:
            for turn in turns:
                encoded = encode_prompt(target, turn, answers, max_new_tokens)
                if encoded.is_visual.any():
                    answer = generate(target, seat, encoded, **limits).tokens
                    sample = BudgetSample(
                        key=turn.key,
                        source=conversation.source,
                        visual_tokens=int(encoded.is_visual.sum()),
                        answer_tokens=len(answer),
                        accepted=seat.accepted(answer),
                        attended=attended(target, encoded, answer, config.focus_tokens),
                        retrieved=seat.retrieved,
                    )
                    result.samples.append(sample)
                else:
                    result.text_only.append(turn.key)
                    answer = generate(target, seat.full, encoded, **limits).tokens if turn is not turns[-1] else []
                answers.append(answer)
        except UnreadablePrompt as error:
            result.failed[conversation.key] = str(error)
        if progress:
            progress(number + 1, len(prompts))
    return result


def attended(target: Target, encoded: Encoded, answer: Sequence[int], count: int) -> list[list[int]]:
    """[T] sets of at most ``count`` visual tokens that the target's last layer attends to most (F_t of Eq. 29).

    Step t is the one that chooses token t of ``answer``; equal attention goes to the lower index. One pass over prompt
    and answer gives all steps. Empty for a target that does not say what it attends to token by token.
    """
    _, prefill = target.prefill(encoded.followed_by(answer[:-1]), 1)
    if prefill.visual_attention is None:
        return []
    steps = torch.arange(len(answer), device=target.device) + (len(encoded.ids) - 1)
    order = prefill.visual_attention(steps).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values.tolist()
