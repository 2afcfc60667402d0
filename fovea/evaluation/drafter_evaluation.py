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
from fovea.decoding.proposer import Proposer
from fovea.decoding.selection import GREEDY, Selection
from fovea.drafters.base import Drafter
from fovea.drafters.interfaces import proposer_for
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import build_drafter
from fovea.drafters.training_free import TrainingFree
from fovea.drafters.whole import whole_drafter
from fovea.evaluation.budget_report import write_budget_report
from fovea.evaluation.evidence import draw_evidence, evidence_steps, spread
from fovea.evaluation.prompts import balanced, user_turns
from fovea.evaluation.results import EVIDENCE, SpeedResult
from fovea.evaluation.speed import evaluate_and_save
from fovea.evaluation.speed_config import SpeedConfig
from fovea.evaluation.style import save
from fovea.evaluation.trajectory import Trajectory, collect_trajectory
from fovea.evaluation.trajectory_files import question_of, save_trajectories
from fovea.evaluation.unfinished import identity_of
from fovea.evaluation.visual_budget import BudgetConfig, measure_budgets, require_visual
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.images import open_image

#: A trajectory shows an answer of at least so many tokens, if there is one.
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
        identity: what answers depend on and reports need not say, such as a hash of the target's weights. With it the
            answers are kept one by one, so that an evaluation that was killed goes on; None keeps none.
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
        identity: Mapping[str, Any] | None = None,
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
        self.identity = identity
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
        earlier: Path | None = None,
        insist: bool = False,
    ) -> SpeedResult:
        """Measures ``drafter`` on ``count`` prompts (None: all), on all ranks; traces and a picture go to ``folder``.

        A trained drafter decodes as a copy in the target's number format; the original is only read. Traces and
        reports call it ``method``, or by its own name. An evaluation that was killed in ``folder``, or in ``earlier``,
        goes on behind its last answer; ``insist`` refuses one that was another. Once everything that is made of the
        results is there, :func:`fovea.evaluation.unfinished.discard_answers` lets go of them.

        Raises:
            OtherSettingsError: the evaluation in ``earlier`` had other settings.
            LosslessnessError: an answer differs from the baseline's; the traces are saved before.
            ValueError: not one prompt could be read, or budgets cannot be measured.
        """
        prompts = balanced(self.prompts, count)
        if isinstance(drafter, Drafter):
            drafter = whole_drafter(drafter)
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
                    identity=self._identity_of(prompts, drafter),
                    earlier=earlier,
                    insist=insist,
                )
            if _first_rank():
                self._keep_trajectories(target, proposer, prompts, result, folder)
            if _first_rank() and self.budget is not None and isinstance(proposer, NeuralProposer):
                self._measure_budgets(target, proposer.drafter, prompts, result, self.budget, folder)
        return result

    def _identity_of(self, prompts: Sequence[Conversation], drafter: Drafter | TrainingFree) -> dict[str, Any] | None:
        if self.identity is None:
            return None
        return identity_of(prompts, drafter if isinstance(drafter, Drafter) else None, self.identity)

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

    def _keep_trajectories(
        self,
        target: HFTarget,
        proposer: Proposer,
        prompts: Sequence[Conversation],
        result: SpeedResult,
        folder: Path,
    ) -> None:
        """A few answers round by round, and the evidence picture of the first; none where nothing is retrieved."""
        wanted = self.config.trajectories
        if not wanted and not (self.evidence_steps and isinstance(proposer, NeuralProposer)):
            return
        kept = []
        for prompt in illustrative_prompts(prompts, result, max(1, wanted)):
            encoded = target.encode(prompt, [])
            limits = {"max_new_tokens": self.config.max_new_tokens, "selection": self.selection}
            method, source = result.settings["method"], prompt.source
            trajectory = collect_trajectory(target, proposer, encoded, method=method, source=source, **limits)
            kept.append((prompt, encoded, trajectory))
        if wanted:
            save_trajectories(folder, kept, self._decode(target))
        if self.evidence_steps and kept:
            prompt, encoded, trajectory = kept[0]
            self._draw_evidence(target, prompt, encoded, trajectory, folder / EVIDENCE)

    def _draw_evidence(
        self, target: HFTarget, prompt: Conversation, encoded: Encoded, trajectory: Trajectory, path: Path
    ) -> None:
        if not (steps := evidence_steps(trajectory)):
            return
        figure = draw_evidence(
            [open_image(source) for source in prompt.images],
            encoded.grids,
            trajectory.trace.tokens,
            spread(steps, self.evidence_steps),
            self._decode(target),
            views=encoded.views,
            question=question_of(prompt),
        )
        save(figure, path)

    @staticmethod
    def _decode(target: HFTarget) -> Callable[[Sequence[int]], str]:
        return lambda ids: target.tokenizer.decode(list(ids), skip_special_tokens=False)

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


def illustrative_prompts(prompts: Sequence[Conversation], result: SpeedResult, count: int) -> list[Conversation]:
    """At most ``count`` first questions whose answers are worth looking at, of as many sources as there are.

    Those about pictures go first, among them long answers, among them those with many visual tokens. The baseline's
    answers decide, so that every drafter is shown with the same prompts.
    """
    answered = {prompt.autoregressive.key: prompt.autoregressive for prompt in result.prompts}
    ranked = []
    for conversation in prompts:
        first = user_turns(conversation)[0]
        if (trace := answered.get(first.key)) is not None:
            ranked.append((bool(first.images), min(len(trace.tokens), _LONG_ANSWER), trace.visual_tokens, first))
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return balanced([entry[3] for entry in ranked], count)


def _first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
