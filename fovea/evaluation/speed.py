"""Measures decoding speed: every prompt answered with and without the drafter, side by side in one run.

Baseline and drafter share target, kernels, cache type, selector, cap and end tokens. Which goes first changes from
answer to answer, so that a warm cache, a rising clock or another process profits neither. A conversation with several
user turns is answered turn by turn, each behind the target's own answers to the earlier ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fovea.decoding.proposer import Proposer, Remembering
from fovea.decoding.selection import GREEDY, Selection
from fovea.evaluation.prompts import user_turns
from fovea.evaluation.race import Race
from fovea.evaluation.results import CONTINUED, CONTINUED_FROM, SpeedResult
from fovea.evaluation.speed_config import SpeedConfig
from fovea.evaluation.unfinished import UnfinishedAnswers
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget

logger = logging.getLogger(__name__)

#: Called after every conversation with the number done and the number of all.
Progress = Callable[[int, int], None]


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
    race = Race(target, proposer, config, selection, method)
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
