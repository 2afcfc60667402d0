"""What is asked: which conversations, turn by turn, each as the target reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fovea.decoding.stopping import token_cap
from fovea.targets.base import Encoded, Target
from fovea.targets.conversation import Conversation, turn_key


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
