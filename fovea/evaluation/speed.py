"""Measures decoding speed: every prompt answered with and without the drafter, side by side in one run.

Baseline and drafter share target, kernels, cache type, selector, cap and end tokens. Which goes first changes from
answer to answer, so that a warm cache, a rising clock or another process profits neither. A conversation with several
user turns is answered turn by turn, each behind the target's own answers to the earlier ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.proposer import Proposer, Recalling, Remembering
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.transformers_generate import generate_transformers
from fovea.evaluation.bootstrap import RESAMPLES
from fovea.evaluation.losslessness import compare
from fovea.evaluation.prompts import UnreadablePrompt, encode_prompt, user_turns
from fovea.evaluation.results import CONTINUED, CONTINUED_FROM, PromptResult, SpeedResult
from fovea.evaluation.unfinished import Answered, UnfinishedAnswers
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget

logger = logging.getLogger(__name__)

#: Called after every conversation with the number done and the number of all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SpeedConfig:
    """How speed is measured.

    Attributes:
        max_new_tokens: cap of an answer, the first token included.
        prompts_per_epoch: conversations measured after an epoch, over all ranks, evenly drawn from the sources.
        prompts: conversations of the final evaluation; None takes all.
        warmup_prompts: conversations per rank that are answered before anything is measured.
        warmup_tokens: cap of a warm-up answer.
        transformers_prompts: conversations per rank that transformers' ``generate`` answers too.
        resamples: of the bootstrap behind the confidence intervals; 0 makes none.
        trajectories: prompts whose answers are decoded once more, behind the measurement, and kept round by round.
        batch_size: requests decoded at once; only 1, as the papers measure.
    """

    max_new_tokens: int = 200
    prompts_per_epoch: int = 24
    prompts: int | None = None
    warmup_prompts: int = 2
    warmup_tokens: int = 32
    transformers_prompts: int = 8
    resamples: int = RESAMPLES
    trajectories: int = 3
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prompts_per_epoch", "prompts", "warmup_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("warmup_prompts", "transformers_prompts", "resamples", "trajectories"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.batch_size != 1:
            raise ValueError(f"batch_size is {self.batch_size}; one request is decoded at a time: leave it at 1")


def evaluate_speed(
    target: HFTarget,
    proposer: Proposer,
    prompts: Sequence[Conversation],
    config: SpeedConfig,
    *,
    selection: Selection = GREEDY,
    method: str = "speculative",
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    rank: int = 0,
    world: int = 1,
    unfinished: UnfinishedAnswers | None = None,
) -> SpeedResult:
    """This rank's share of the measurement: every ``world``-th of ``prompts``, from ``rank`` on.

    Conversations that cannot be read are left out, and named in the result with the reason. ``method`` names the
    drafter in traces and reports; ``settings`` is what a report should say about the decoding beside what is known
    here, such as the draft tree. ``unfinished``, opened, holds what was answered before and takes what is answered now.
    """
    mine = [prompts[index] for index in range(rank, len(prompts), world)]
    race = _Race(target, proposer, config, selection, method)
    known = unfinished.answered if unfinished else {}
    if known and not race.can_go_on:
        logger.warning("%s drafts from answers that it cannot be told again: all is measured anew", method)
        known = {}
    if any(conversation.key not in known for conversation in mine):
        race.warm_up(mine)
    if isinstance(proposer, Remembering):
        proposer.forget()  # the warm-up's answers are answers to be measured
    result = SpeedResult([], {}, _settings(target, config, selection, method, world) | dict(settings or {}))
    continued, shared = 0, set[int]()
    for number, conversation in enumerate(mine):
        if (answered := known.get(conversation.key)) is not None:
            race.pass_over(answered)
            continued += len(answered.prompts)
            shared.add(answered.processes)
        else:
            answered = race.answered(conversation, with_transformers=number < config.transformers_prompts)
            if unfinished:
                unfinished.add(replace(answered, processes=world))
        result.prompts.extend(answered.prompts)
        if answered.failed is not None:
            logger.warning("left out of the evaluation: %s", answered.failed)
            result.failed[conversation.key] = answered.failed
        if progress:
            progress(number + 1, len(mine))
    if continued:
        result.settings[CONTINUED] = continued
    if others := shared - {world}:
        result.settings[CONTINUED_FROM] = sorted(others)
    return result


def evaluate_and_save(
    target: HFTarget,
    proposer: Proposer,
    prompts: Sequence[Conversation],
    config: SpeedConfig,
    folder: Path,
    *,
    selection: Selection = GREEDY,
    method: str = "speculative",
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    identity: Mapping[str, Any] | None = None,
    earlier: Path | None = None,
    insist: bool = False,
) -> SpeedResult:
    """:func:`evaluate_speed` on all ranks of the process group, if there is one; all get the pooled result.

    It is in the order of ``prompts``, whoever has answered which.

    The first rank writes it to ``folder``, before it is judged. Where ``identity`` says what the answers depend on
    beside the settings, they are kept there one by one, and those are taken over that a killed evaluation kept there or
    in ``earlier``, on whatever number of ranks; see :class:`fovea.evaluation.unfinished.UnfinishedAnswers`, also for
    ``insist``.

    Raises:
        LosslessnessError: an answer differs from the baseline's and no near-tie explains it.
        ValueError: not one prompt could be read.
        OtherSettingsError: the answers of ``earlier`` were decoded with other settings.
    """
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    place = {"rank": rank, "world": world}
    with ExitStack() as stack:
        unfinished = None
        if identity is not None:
            known = _settings(target, config, selection, method, world) | dict(settings or {})
            depends_on = {**identity, "transformers_prompts": config.transformers_prompts, **known}
            unfinished = UnfinishedAnswers(
                folder,
                depends_on,
                keys={prompt.key for prompt in prompts[rank::world]},
                # What a drafter remembers are the answers of its own share.
                redealt=not isinstance(proposer, Remembering),
                earlier=earlier,
                insist=insist,
                **place,
            )
            stack.enter_context(unfinished)
        shard = evaluate_speed(
            target,
            proposer,
            prompts,
            config,
            selection=selection,
            method=method,
            settings=settings,
            progress=progress,
            unfinished=unfinished,
            **place,
        )
    shards = [shard]
    if distributed:
        shards = [shard] * world
        dist.all_gather_object(shards, shard)
    result = _in_order(SpeedResult.merged(shards), prompts)
    if not result.prompts:
        first = next(iter(result.failed.values()), "there are no prompts")
        raise ValueError(f"none of the {len(prompts)} prompts could be answered; {first}")
    if rank == 0:
        result.save(folder)
        if result.settings["dtype"] == "float32" and (keys := result.differ_from_transformers):
            logger.warning(
                "transformers' own generate answers %d prompts otherwise than the autoregressive loop, first '%s': the "
                "target is not run as its model would be, so do not trust its figures (docs/new_target.md)",
                len(keys),
                keys[0],
            )
    result.require_lossless()
    return result


def _in_order(result: SpeedResult, prompts: Sequence[Conversation]) -> SpeedResult:
    """``result`` in the order of ``prompts``, whoever has answered which."""
    places = {turn.key: place for place, prompt in enumerate(prompts) for turn in user_turns(prompt)}
    failed = {prompt.key: result.failed[prompt.key] for prompt in prompts if prompt.key in result.failed}
    answered = sorted(result.prompts, key=lambda prompt: places[prompt.speculative.key])
    return replace(result, prompts=answered, failed=failed)


class _Race:
    """Answers prompts with every decoder; the one that starts changes from prompt to prompt."""

    def __init__(
        self, target: HFTarget, proposer: Proposer, config: SpeedConfig, selection: Selection, method: str
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.config = config
        self.selection = selection
        self.method = method
        self._run = 0

    def warm_up(self, conversations: Sequence[Conversation]) -> None:
        """Answers the first readable conversations for nothing."""
        short = replace(self.config, max_new_tokens=min(self.config.warmup_tokens, self.config.max_new_tokens))
        race, warm = _Race(self.target, self.proposer, short, self.selection, self.method), 0
        for conversation in conversations:
            if warm == self.config.warmup_prompts:
                break
            try:
                warm += len(list(race.run(conversation, with_transformers=self.config.transformers_prompts > 0))) > 0
            except UnreadablePrompt:
                continue

    @property
    def can_go_on(self) -> bool:
        """Whether what the proposer knows behind some answers can be made again from them."""
        return isinstance(self.proposer, Recalling) or not isinstance(self.proposer, Remembering)

    def pass_over(self, answered: Answered) -> None:
        """Goes on as behind the conversation that was ``answered`` before."""
        self._run += len(answered.prompts)
        if isinstance(self.proposer, Recalling):
            for prompt in answered.prompts:
                self.proposer.recall(prompt.speculative.tokens)

    def answered(self, conversation: Conversation, with_transformers: bool) -> Answered:
        """The conversation answered, as far as it can be read."""
        prompts: list[PromptResult] = []
        try:
            prompts.extend(self.run(conversation, with_transformers))
        except UnreadablePrompt as error:
            return Answered(conversation.key, prompts, str(error))
        return Answered(conversation.key, prompts)

    def run(self, conversation: Conversation, with_transformers: bool) -> Iterator[PromptResult]:
        """A result per user turn.

        Raises:
            UnreadablePrompt: the target cannot answer a turn.
        """
        answers: list[list[int]] = []
        for prompt in user_turns(conversation):
            encoded = encode_prompt(self.target, prompt, answers, self.config.max_new_tokens)
            traces = self._traces(encoded, conversation.source, with_transformers)
            autoregressive, speculative = traces["autoregressive"], traces["speculative"]
            comparison = compare(
                self.target,
                encoded,
                autoregressive.tokens,
                speculative.tokens,
                selection=self.selection,
                max_new_tokens=self.config.max_new_tokens,
            )
            yield PromptResult(speculative, autoregressive, comparison, traces.get("transformers"))
            answers.append(autoregressive.tokens)

    def _traces(self, encoded: Encoded, source: str, with_transformers: bool) -> dict[str, GenerationTrace]:
        limits: dict[str, Any] = {
            "max_new_tokens": self.config.max_new_tokens,
            "selection": self.selection,
            "source": source,
        }
        decoders: dict[str, Callable[[], GenerationTrace]] = {
            "autoregressive": lambda: generate_autoregressive(self.target, encoded, **limits),
            "speculative": lambda: generate(self.target, self.proposer, encoded, method=self.method, **limits),
        }
        if with_transformers:
            decoders["transformers"] = lambda: generate_transformers(self.target, encoded, **limits)
        names = list(decoders)
        first = self._run % len(names)
        self._run += 1
        return {name: decoders[name]() for name in names[first:] + names[:first]}


def _settings(target: HFTarget, config: SpeedConfig, selection: Selection, method: str, world: int) -> dict[str, Any]:
    device = target.device
    return {
        "method": method,
        "selection": selection.describe(),
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "resamples": config.resamples,
        "target": target.spec.architecture,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_threads": torch.get_num_threads(),
        "processes": world,
    }
