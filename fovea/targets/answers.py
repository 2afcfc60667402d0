"""The target's own greedy answers to whole conversations, turn by turn, in left-padded batches.

Legend: ``B`` prompts, ``T`` tokens, ``A`` rotary axes, ``D`` hidden width, ``Q`` and ``K`` rows and columns of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from fovea.targets.base import Encoded
from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation, prompts_of
from fovea.targets.padding import pad

if TYPE_CHECKING:
    from fovea.targets.hf import HFTarget


def answer_greedily(
    target: HFTarget, conversations: Sequence[Conversation], max_new_tokens: int, batch_size: int
) -> list[list[list[int]]]:
    """See :meth:`fovea.targets.base.Target.answer`. Prompts of like length share a batch.

    A prompt that the context does not hold, earlier answers included, is answered with nothing.
    """
    turns = [prompts_of(conversation) for conversation in conversations]
    answers: list[list[list[int]]] = [[] for _ in conversations]
    for turn in range(max(map(len, turns), default=0)):
        prompts: dict[int, Encoded] = {}
        for index, asked in enumerate(turns):
            if turn < len(asked):
                prompt = _encoded(target, asked[turn], answers[index])
                if prompt is None:
                    answers[index].append([])
                else:
                    prompts[index] = prompt
        order = sorted(prompts, key=lambda index: prompts[index].ids.shape[0])
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            replies = _generate(target, [prompts[index] for index in chosen], max_new_tokens)
            for index, reply in zip(chosen, replies, strict=True):
                answers[index].append(reply)
    return answers


def _encoded(target: HFTarget, prompt: Conversation, answers: Sequence[Sequence[int]]) -> Encoded | None:
    """What the target reads; None if its context leaves no room for an answer."""
    try:
        encoded = target.encode(prompt, answers)
    except PromptError:
        if answers:  # it could be read before they were given
            return None
        raise
    return encoded if encoded.ids.shape[0] < target.spec.max_positions else None


@torch.inference_mode()
def _generate(target: HFTarget, batch: Sequence[Encoded], max_new_tokens: int) -> list[list[int]]:
    """Greedy continuations of ``batch``, each up to and with its first end token, or to the end of the context.

    A finished row leaves the batch: answers differ in length, and the longest should not make the others wait.
    """
    padded, device = pad(batch, "left", target.device), target.device
    next_B = torch.tensor([encoded.next_position for encoded in batch], device=device)
    caps = [min(max_new_tokens, target.spec.max_positions - encoded.ids.shape[0]) for encoded in batch]

    width = padded.ids.shape[1]
    visible_B1T = padded.valid[:, None]
    causal_TT = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    cache = DynamicCache()
    hidden_BTD = target.run_layers(
        target.merge(padded.ids, padded.is_visual, target.read_visual(batch)),
        padded.positions,
        _additive(visible_B1T & causal_TT, target.dtype),
        cache=cache,
    )
    replies: list[list[int]] = [[] for _ in batch]
    unfinished = replies
    for step in range(max_new_tokens):
        token_B = target.lm_head(hidden_BTD[:, -1]).argmax(-1)
        for reply, token in zip(unfinished, token_B.tolist(), strict=True):
            reply.append(token)
        going = [
            row
            for row, (reply, cap) in enumerate(zip(unfinished, caps, strict=True))
            if reply[-1] not in target.spec.eos_ids and len(reply) < cap
        ]
        if not going:
            break
        if len(going) < len(unfinished):
            unfinished, caps = [unfinished[row] for row in going], [caps[row] for row in going]
            kept = torch.tensor(going, device=device)
            token_B, next_B, visible_B1T = token_B[kept], next_B[kept], visible_B1T[kept]
            cache.batch_select_indices(kept)
        visible_B1T = F.pad(visible_B1T, (0, 1), value=True)
        hidden_BTD = target.run_layers(
            target.embed(token_B[:, None]),
            (next_B + step).expand(target.spec.rope.axes, -1)[..., None],
            _additive(visible_B1T, target.dtype),
            cache=cache,
        )
    return replies


def _additive(visible_BQK: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, Q, K] mask to add to scores; a row that sees nothing, such as padding, stays finite."""
    mask = torch.zeros(visible_BQK.shape, dtype=dtype, device=visible_BQK.device)
    return mask.masked_fill_(~visible_BQK, torch.finfo(dtype).min)[:, None]
