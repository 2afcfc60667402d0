"""Judges a drafter beside the whole target: after an epoch of training, at its end, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fovea.decoding.growth import TreeConfig
from fovea.decoding.selection import GREEDY, Selection
from fovea.drafters.base import Drafter
from fovea.drafters.interfaces import proposer_for
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import build_drafter
from fovea.drafters.training_free import TrainingFree
from fovea.evaluation.budget_report import write_budget_report
from fovea.evaluation.evidence import collect_evidence, draw_evidence, spread
from fovea.evaluation.results import EVIDENCE, SpeedResult
from fovea.evaluation.speed import SpeedConfig, balanced, evaluate_and_save, user_turns
from fovea.evaluation.style import save
from fovea.evaluation.visual_budget import BudgetConfig, measure_budgets, require_visual
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.images import open_image

#: An evidence picture shows an answer of at least so many tokens, if there is one.
_LONG_ANSWER = 16


class DrafterEvaluation:
    """Measures drafters on a target that waits in host memory in between.

    Args:
        load_target: loads the whole target, in the number format to decode in; called when it is first needed.
        prompts: what is asked.
        tree: draft tree.
        config: how speed is measured.
        selection: how tokens are selected.
        settings: what reports should say beside it, such as the artifacts' fingerprint.
        evidence_steps: panels of the evidence picture; 0 draws none.
        budget: the visual budgets to draft under beside it; None leaves that out.
        progress: show a bar.
    """

    def __init__(
        self,
        load_target: Callable[[], HFTarget],
        prompts: Sequence[Conversation],
        tree: TreeConfig,
        config: SpeedConfig,
        *,
        selection: Selection = GREEDY,
        settings: Mapping[str, Any] | None = None,
        evidence_steps: int = 4,
        budget: BudgetConfig | None = None,
        progress: bool = True,
    ) -> None:
        self.load_target = load_target
        self.prompts = prompts
        self.tree = tree
        self.config = config
        self.selection = selection
        self.settings = dict(settings or {})
        self.evidence_steps = evidence_steps
        self.budget = budget
        self.progress = progress
        self._target: HFTarget | None = None

    def run(
        self,
        drafter: Drafter | TrainingFree,
        folder: Path,
        *,
        device: torch.device | str,
        count: int | None = None,
        method: str | None = None,
    ) -> SpeedResult:
        """Measures ``drafter`` on ``count`` prompts (None: all), on all ranks; traces and a picture go to ``folder``.

        A trained drafter decodes as a copy in the target's number format; the original is only read. Traces and
        reports call it ``method``, or by its own name.

        Raises:
            LosslessnessError: an answer differs from the baseline's; the traces are saved before.
            ValueError: not one prompt could be read, or budgets cannot be measured.
        """
        prompts = balanced(self.prompts, count)
        with self._target_on(device) as target:
            if self.budget is not None:
                require_visual(target, prompts, self.config.max_new_tokens)
            if isinstance(drafter, TrainingFree):
                proposer, about = drafter.proposer(target.spec), drafter.settings()
            else:
                proposer = proposer_for(decoding_copy(drafter, target), self.tree)
                about = drafting_settings(proposer)
            with self._bar("measuring speed") as progress:
                result = evaluate_and_save(
                    target,
                    proposer,
                    prompts,
                    self.config,
                    folder,
                    selection=self.selection,
                    method=method or drafter.name,
                    settings=about | self.settings,
                    progress=progress,
                )
            if _first_rank() and self.evidence_steps and isinstance(proposer, NeuralProposer):
                self._draw_evidence(target, proposer, prompts, result, folder / EVIDENCE)
            if _first_rank() and self.budget is not None and isinstance(proposer, NeuralProposer):
                self._measure_budgets(target, proposer.drafter, prompts, result, self.budget, folder)
        return result

    def _measure_budgets(
        self,
        target: HFTarget,
        drafter: Drafter,
        prompts: Sequence[Conversation],
        result: SpeedResult,
        config: BudgetConfig,
        folder: Path,
    ) -> None:
        with self._bar("visual budgets") as progress:
            measured = measure_budgets(
                target,
                drafter,
                self.tree,
                prompts,
                config,
                max_new_tokens=self.config.max_new_tokens,
                selection=self.selection,
                settings=result.settings,
                progress=progress,
            )
        measured.save(folder)
        write_budget_report(folder)

    def _draw_evidence(
        self,
        target: HFTarget,
        proposer: NeuralProposer,
        prompts: Sequence[Conversation],
        result: SpeedResult,
        path: Path,
    ) -> None:
        """The picture of one prompt, the same for every drafter; none where nothing is retrieved."""
        prompt = illustrative_prompt(prompts, result)
        if prompt is None:
            return
        encoded = target.encode(prompt, [])
        answer, steps = collect_evidence(
            target, proposer, encoded, max_new_tokens=self.config.max_new_tokens, selection=self.selection
        )
        if not steps:
            return
        tokenizer = target.tokenizer
        figure = draw_evidence(
            [open_image(source) for source in prompt.images],
            encoded.grids,
            answer,
            spread(steps, self.evidence_steps),
            lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
            views=encoded.views,
            question=_question(prompt),
        )
        save(figure, path)

    @contextmanager
    def _target_on(self, device: torch.device | str) -> Iterator[HFTarget]:
        """The target on ``device``; afterwards it is back in host memory."""
        if self._target is None:
            self._target = self.load_target()
        home = self._target.device
        self._target.to(device)
        try:
            yield self._target
        finally:
            self._target.to(home)
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()

    @contextmanager
    def _bar(self, task: str) -> Iterator[Callable[[int, int], None]]:
        columns = (TextColumn(task), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        shown = self.progress and _first_rank()
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bars:
            bar = bars.add_task(task)
            yield lambda done, total: bars.update(bar, completed=done, total=total)


@torch.no_grad()
def decoding_copy(drafter: Drafter, target: HFTarget) -> Drafter:
    """``drafter`` as it decodes: on the device of ``target``, in its number format, with its head, in eval mode."""
    copy = build_drafter(drafter.name, drafter.spec, drafter.config, target.head)
    copy.load_state_dict(drafter.state_dict())
    return copy.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def drafting_settings(proposer: NeuralProposer) -> dict[str, Any]:
    """What a report says about a drafter and its tree."""
    drafter, tree = proposer.drafter, proposer.tree
    retrieval = getattr(drafter.config, "retrieval", None)
    return {
        "drafter_parameters": sum(weight.numel() for weight in drafter.parameters()),
        "tree": asdict(tree),
        "most_tokens_per_round": tree.passes + 1,
        **({} if retrieval is None else {"retrieval": asdict(retrieval)}),
    }


def illustrative_prompt(prompts: Sequence[Conversation], result: SpeedResult) -> Conversation | None:
    """The first question about a picture whose evidence is worth looking at: a long answer, many visual tokens.

    The baseline's answers decide, so that every drafter is shown with the same prompt.
    """
    answered = {prompt.autoregressive.key: prompt.autoregressive for prompt in result.prompts}
    best, best_rank = None, (-1, -1)
    for conversation in prompts:
        first = user_turns(conversation)[0]
        trace = answered.get(first.key)
        if first.images and trace is not None:
            rank = (min(len(trace.tokens), _LONG_ANSWER), trace.visual_tokens)
            if rank > best_rank:
                best, best_rank = first, rank
    return best


def _question(prompt: Conversation) -> str:
    content = prompt.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


def _first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
