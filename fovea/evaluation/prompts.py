"""What is asked: which conversations, turn by turn, each as the target reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fovea.decoding.stopping import token_cap
from fovea.targets.base import Encoded, Target
from fovea.targets.conversation import Conversation, prompts_of, turn_key
from fovea.targets.messages import MessageError, checked_turns


class UnreadablePrompt(ValueError):  # noqa: N818 - an outcome that is counted, not a failure of the evaluation
    """A prompt that the target cannot answer: a broken picture, or a text beyond its context."""


def balanced(prompts: Sequence[Conversation], count: int | None) -> list[Conversation]:
    """``count`` conversations, as even as can be over their sources, each source in its order; None takes all."""
    by_source: dict[str, list[Conversation]] = {}
    for conversation in prompts:
        by_source.setdefault(conversation.source, []).append(conversation)
    longest = max(map(len, by_source.values()), default=0)
    in_turn = [own[place] for place in range(longest) for own in by_source.values() if place < len(own)]
    return in_turn[:count]


def user_turns(conversation: Conversation) -> list[Conversation]:
    """A prompt per user turn: the conversation up to its answer, with the pictures shown by then.

    Keys of several turns get the turn's number behind a ``#``. A conversation that cannot be read is returned as it is,
    for the target to refuse by its name.
    """
    try:
        checked_turns(conversation.messages, len(conversation.images))
    except MessageError:
        return [conversation]
    prompts = prompts_of(conversation)
    return [
        replace(prompt, key=turn_key(conversation.key, number, len(prompts)))
        for number, prompt in enumerate(prompts, start=1)
    ]


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
