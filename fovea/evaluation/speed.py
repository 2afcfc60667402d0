"""Measures decoding speed: every prompt answered with and without the drafter, side by side in one run.

Baseline and drafter share target, kernels, cache type, selector, cap and end tokens. Which goes first changes from
answer to answer, so that a warm cache, a rising clock or another process profits neither. A conversation with several
user turns is answered turn by turn, each behind the target's own answers to the earlier ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.proposer import Proposer, Remembering
from fovea.decoding.selection import GREEDY, Selection
from fovea.decoding.speculative import generate
from fovea.decoding.stopping import token_cap
from fovea.decoding.trace import GenerationTrace
from fovea.decoding.transformers_generate import generate_transformers
from fovea.evaluation.bootstrap import RESAMPLES
from fovea.evaluation.losslessness import compare
from fovea.evaluation.results import PromptResult, SpeedResult
from fovea.targets.base import Encoded, Target
from fovea.targets.conversation import Conversation, turn_key
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
    """

    max_new_tokens: int = 200
    prompts_per_epoch: int = 24
    prompts: int | None = None
    warmup_prompts: int = 2
    warmup_tokens: int = 32
    transformers_prompts: int = 8
    resamples: int = RESAMPLES
    trajectories: int = 3

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prompts_per_epoch", "prompts", "warmup_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("warmup_prompts", "transformers_prompts", "resamples", "trajectories"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


class UnreadablePrompt(ValueError):  # noqa: N818 - an outcome that is counted, not a failure of the evaluation
    """A prompt that the target cannot answer: a broken picture, or a text beyond its context."""


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
) -> SpeedResult:
    """This rank's share of the measurement: every ``world``-th of ``prompts``, from ``rank`` on.

    Conversations that cannot be read are left out, and named in the result with the reason. ``method`` names the
    drafter in traces and reports; ``settings`` is what a report should say about the decoding beside what is known
    here, such as the draft tree.
    """
    mine = [prompts[index] for index in range(rank, len(prompts), world)]
    race = _Race(target, proposer, config, selection, method)
    race.warm_up(mine)
    if isinstance(proposer, Remembering):
        proposer.forget()  # the warm-up's answers are answers to be measured
    result = SpeedResult([], {}, _settings(target, config, selection, method, world) | dict(settings or {}))
    for number, conversation in enumerate(mine):
        try:
            result.prompts.extend(race.run(conversation, with_transformers=number < config.transformers_prompts))
        except UnreadablePrompt as error:
            logger.warning("left out of the evaluation: %s", error)
            result.failed[conversation.key] = str(error)
        if progress:
            progress(number + 1, len(mine))
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
) -> SpeedResult:
    """:func:`evaluate_speed` on all ranks of the process group, if there is one; all get the pooled result.

    The first rank writes it to ``folder``, before it is judged.

    Raises:
        LosslessnessError: an answer differs from the baseline's and no near-tie explains it.
        ValueError: not one prompt could be read.
    """
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    shard = evaluate_speed(
        target,
        proposer,
        prompts,
        config,
        selection=selection,
        method=method,
        settings=settings,
        progress=progress,
        rank=rank,
        world=world,
    )
    shards = [shard]
    if distributed:
        shards = [shard] * world
        dist.all_gather_object(shards, shard)
    result = SpeedResult.merged(shards)
    if not result.prompts:
        first = next(iter(result.failed.values()), "there are no prompts")
        raise ValueError(f"none of the {len(prompts)} prompts could be answered; {first}")
    if rank == 0:
        result.save(folder)
    result.require_lossless()
    return result


def balanced(prompts: Sequence[Conversation], count: int | None) -> list[Conversation]:
    """``count`` conversations, as even as can be over their sources, each source in its order; None takes all."""
    by_source: dict[str, list[Conversation]] = {}
    for conversation in prompts:
        by_source.setdefault(conversation.source, []).append(conversation)
    longest = max(map(len, by_source.values()), default=0)
    in_turn = [own[place] for place in range(longest) for own in by_source.values() if place < len(own)]
    return in_turn[:count]


def user_turns(conversation: Conversation) -> list[Conversation]:
    """A prompt per user turn: the conversation up to it, with the pictures shown by then.

    Keys of several turns get the turn's number behind a ``#``.
    """
    ends = [place for place, message in enumerate(conversation.messages) if message["role"] == "user"]
    prompts = []
    for number, end in enumerate(ends, start=1):
        messages = conversation.messages[: end + 1]
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        shown = sum(part["type"] == "image" for content in contents for part in content)
        key = turn_key(conversation.key, number, len(ends))
        prompts.append(replace(conversation, key=key, messages=messages, images=conversation.images[:shown]))
    return prompts


def encode_prompt(
    target: Target, prompt: Conversation, answers: Sequence[Sequence[int]], max_new_tokens: int
) -> Encoded:
    """``prompt`` behind the target's own ``answers`` to its earlier turns.

    Raises:
        UnreadablePrompt: the target cannot answer it.
    """
    try:
        encoded = target.encode(prompt, answers)
        token_cap(target.spec, encoded, max_new_tokens)
    except ValueError as error:
        raise UnreadablePrompt(str(error)) from error
    return encoded


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
        "batch_size": 1,
        "resamples": config.resamples,
        "target": target.spec.architecture,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_threads": torch.get_num_threads(),
        "processes": world,
    }
