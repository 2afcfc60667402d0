"""A conversation: chat turns and the pictures they speak of, before any tokenizer has seen them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class StoredImage:
    """An encoded picture inside a larger file, such as a table; it is read when it is opened.

    Attributes:
        name: what messages call it; unique in its data set.
        read: gives its encoded bytes.
        origin: name of the file it was made of, if the larger file tells.
    """

    name: str
    read: Callable[[], bytes] = field(repr=False, compare=False)
    origin: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.name


#: A picture in memory, or the file, part of a file, URL or data URI that holds it.
ImageSource = Image.Image | StoredImage | Path | str


@dataclass(frozen=True)
class Conversation:
    """Chat turns in the message format of transformers, with their pictures in order of appearance.

    ``messages`` is a list of ``{"role": ..., "content": ...}``; a content is a string or a list of parts
    ``{"type": "text", "text": ...}`` and ``{"type": "image"}``. The i-th image part of the whole conversation
    shows ``images[i]``. Assistant messages hold strings. A conversation that ends with a user turn is a prompt.

    Attributes:
        key: stable and unique in its data set; any characters.
        source: the family or benchmark it belongs to; results are reported per source.
        answer: what a right answer holds, for accuracy reports; not used by any method.
        meta: what its file tells besides: ``id`` of the sample, and ``images``, a name or None per picture.
        fault: why its source could make no conversation of what it read there; every target refuses it with these
            words, so that it is counted like one that the target cannot read.
    """

    key: str
    messages: list[dict[str, Any]]
    images: tuple[ImageSource, ...] = ()
    source: str = ""
    answer: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    fault: str = ""


_TURN = re.compile(r"#\d+$")


def turn_key(key: str, number: int, turns: int) -> str:
    """Key of turn ``number``, from 1, of the conversation ``key``: with the number behind a ``#`` if there are more.

    A key that ends so itself gets the number of its only turn too, so that nobody takes it for a turn of another.
    """
    return f"{key}#{number}" if turns > 1 or _TURN.search(key) else key


def conversation_of(key: str) -> str:
    """Key of the conversation that a prompt belongs to, by the prompt's own, see :func:`turn_key`."""
    return _TURN.sub("", key)


def prompts_of(conversation: Conversation) -> list[Conversation]:
    """A prompt per user turn: all that stands before its answer, with the pictures shown by then.

    The answer's place is that of the next assistant turn; without one, before the next user turn or at the end.

    Args:
        conversation: one whose turns can be read, see :func:`fovea.targets.messages.checked_turns`.
    """
    prompts: list[Conversation] = []
    messages, asked, shown = conversation.messages, False, 0
    for place, message in enumerate([*messages, {"role": "user", "content": ""}]):
        if asked and message["role"] != "system":
            prompts.append(replace(conversation, messages=messages[:place], images=conversation.images[:shown]))
        asked = message["role"] == "user" or (asked and message["role"] == "system")
        if not isinstance(message["content"], str):
            shown += sum(part["type"] != "text" for part in message["content"])
    return prompts
