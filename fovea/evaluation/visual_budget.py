"""How much of its pictures a drafter needs: every iteration drafted under several visual budgets (FOVEA, Appendix A).

The target answers as always, with a drafter that sees everything. Then the same drafter drafts again from the prefix of
every iteration under each smaller budget: of the pictures it has the k(r) visual tokens alone that the target's last
layer attends to most, averaged over heads and over the queries of that prefix, in its context and in what it retrieves
from. One pass of the target over prompt and answer tells its attention at all prefixes, since later tokens change
nothing at earlier ones. What it would accept of those trees is known from the answer, because greedy verification
follows it: so a budget costs its drafting and no pass of the target.

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
from fovea.targets.base import Prefill, Target
from fovea.targets.conversation import Conversation
from fovea.visual.budget import restricted, within_budget

#: Queries whose attention is held at a time.
_ROWS = 256


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


class Recorder:
    """Decodes with full access, and notes all that drafting from the same prefixes again needs.

    Args:
        full: drafts with full access.
    """

    def __init__(self, full: NeuralProposer) -> None:
        self.full = full
        self.max_drafts = full.max_drafts
        self.feature_layers = full.feature_layers

    def start(self, prefill: Prefill) -> None:
        self.prefill = prefill
        #: Tokens and states of every commit; iteration i has the first i + 1 of them.
        self.commits: list[tuple[Tensor, Tensor]] = []
        #: Per iteration, the place in the answer of the first token drafted, and the tree.
        self.iterations: list[tuple[int, DraftTree]] = []
        #: Per iteration, what the root retrieved; nothing where the drafter retrieves nothing.
        self.retrieved: list[list[int]] = []
        self._committed = 0
        self.full.start(prefill)

    def commit(self, tokens: Tensor, states: Tensor) -> None:
        self._committed += len(tokens)
        self.commits.append((tokens, states))
        self.full.commit(tokens, states)

    def propose(self) -> DraftTree:
        tree = self.full.propose()
        self.iterations.append((self._committed, tree))
        if self.full.evidence:
            self.retrieved.append(self.full.evidence[0].selected[0].nonzero()[:, 0].tolist())
        return tree


def accepted_under_budgets(
    recorded: Recorder, proposer: NeuralProposer, whole: Prefill, answer: Sequence[int], ratios: Sequence[float]
) -> list[list[int]]:
    """[I][R] draft tokens that the target accepted with full access, and would have under each smaller budget.

    Args:
        recorded: the iterations; full access is the last of ``ratios``.
        proposer: drafts anew, with the same drafter and tree.
        whole: of prompt and ``answer``, without its last token.
        answer: [T] tokens.
        ratios: ascending budgets.
    """
    prompt = len(recorded.prefill.ids)
    importances = importance_along(whole, [prompt + place for place, _ in recorded.iterations])
    columns = [_accepted_at(ratio, recorded, proposer, importances, answer) for ratio in ratios[:-1]]
    columns.append([accepted_drafts(tree, answer[place:]) for place, tree in recorded.iterations])
    return [list(row) for row in zip(*columns, strict=True)]


def _accepted_at(
    ratio: float, recorded: Recorder, proposer: NeuralProposer, importances: Sequence[Tensor], answer: Sequence[int]
) -> list[int]:
    """[I] draft tokens that would have been accepted at the budget ``ratio``."""
    out: list[int] = []
    seen: Tensor | None = None
    read = 0
    for number, ((place, _), importance) in enumerate(zip(recorded.iterations, importances, strict=True)):
        kept = within_budget(importance, recorded.prefill.is_visual, ratio)
        if seen is None or not torch.equal(kept, seen):
            leave = proposer.drafter.states_leave
            proposer.start(restricted(recorded.prefill, kept, states_leave=leave))
            seen, read = kept, 0
        for tokens, states in recorded.commits[read : number + 1]:
            proposer.commit(tokens, states)
        read = number + 1
        out.append(accepted_drafts(proposer.propose(), answer[place:]))
    return out


def importance_along(whole: Prefill, lengths: Sequence[int]) -> list[Tensor]:
    """[N] float32 importance of the visual tokens at each prefix of so many tokens, ``lengths`` ascending.

    It is the last layer's attention to them, averaged over heads and over the prefix's queries from the first visual
    token on; those before see none of them.
    """
    assert whole.visual_attention is not None
    row = first = int(whole.is_visual.nonzero()[0, 0])
    total = torch.zeros(int(whole.is_visual.sum()), device=whole.ids.device)
    out: list[Tensor] = []
    for length in lengths:
        for rows in torch.arange(row, length, device=total.device).split(_ROWS):
            total = total + whole.visual_attention(rows).sum(0)
        row = length
        out.append(total / (length - first))
    return out


def accepted_drafts(tree: DraftTree, continuation: Sequence[int]) -> int:
    """Draft tokens of ``tree`` that a target accepts which continues with ``continuation``, at least one token."""
    drafts = tree.drafts
    depths = drafts.depths.tolist()

    def choose(row: int) -> int:
        return continuation[depths[row]] if depths[row] < len(continuation) else -1

    return verify(drafts, choose, (), remaining=len(continuation)).accepted


def require_attention(prefill: Prefill) -> None:
    """Refuses a target that does not say what it attends to.

    Raises:
        ValueError: it does not.
    """
    if prefill.visual_attention is None:
        raise ValueError(
            "diagnostics=budget ranks visual tokens by how much the target attends to them, and this target does not "
            "say; let its prefill give visual_attention (see fovea/targets/importance.py), or leave diagnostics out"
        )


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
        require_attention(target.prefill(encoded, 1)[1])
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
    seat, again = Recorder(proposer_for(drafter, tree)), proposer_for(drafter, tree)
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
                    _, whole = target.prefill(encoded.followed_by(answer[:-1]), 1)
                    require_attention(whole)
                    sample = BudgetSample(
                        key=turn.key,
                        source=conversation.source,
                        visual_tokens=int(encoded.is_visual.sum()),
                        answer_tokens=len(answer),
                        accepted=accepted_under_budgets(seat, again, whole, answer, config.ratios),
                        attended=attended(whole, len(answer), config.focus_tokens),
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


def attended(whole: Prefill, answered: int, count: int) -> list[list[int]]:
    """[T] sets of at most ``count`` visual tokens that the target's last layer attends to most (F_t of Eq. 29).

    Step t is the one that chooses token t of the answer; equal attention goes to the lower index.

    Args:
        whole: of prompt and answer, without its last token.
        answered: tokens T of the answer.
        count: of a set.
    """
    assert whole.visual_attention is not None
    steps = torch.arange(-answered, 0, device=whole.ids.device) + len(whole.ids)
    order = whole.visual_attention(steps).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values.tolist()
