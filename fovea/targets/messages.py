"""What chat turns must look like to be read: checked in one place, before a template or a tokenizer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = ("system", "user", "assistant")
#: What a part that stands for a picture may be called; the second by OpenAI.
IMAGE_PARTS = ("image", "image_url")
#: What JSON calls the types that a reader may meet.
_NAMES = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}


class MessageError(ValueError):
    """Chat turns that cannot be read; the message names the turn and the remedy."""


def checked_turns(messages: Any, images: int) -> list[dict[str, Any]]:
    """The turns, each of a role and a list of parts ``{"type": "text", "text"}`` and ``{"type": "image"}`` alone.

    Args:
        messages: see :class:`fovea.targets.conversation.Conversation`; anything that a file may hold.
        images: pictures that there are; each needs its part.

    Raises:
        MessageError: they are not of that form, hold a video, half a character, a picture in an answer or one too
            many, or begin with an answer or with nothing.
    """
    if not isinstance(messages, list | tuple):
        raise MessageError(f"its messages are {named(messages)}; write a list of turns")
    turns = [_turn(message, number) for number, message in enumerate(messages, 1)]
    roles = [turn["role"] for turn in turns]
    asks = next((turn for turn in turns if turn["role"] == "user"), {"content": []})
    if not any(part["type"] == "image" or part["text"].strip() for part in asks["content"]):
        raise MessageError("its first user turn has no text and no image, or there is none; there is nothing to ask")
    if "assistant" in roles[: roles.index("user")]:
        raise MessageError(
            f"turn {roles.index('assistant') + 1}: an assistant's turn stands before the first of the user, and "
            "answers nothing; remove it"
        )
    places = sum(part["type"] == "image" for turn in turns for part in turn["content"])
    if places != images:
        raise MessageError(
            f"it has {images} images and {places} image parts; write one part {{'type': 'image'}} where each belongs"
        )
    return turns


def named(value: Any) -> str:
    """What ``value``, as JSON has it, is called in messages."""
    return _NAMES.get(type(value), "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}")


def require_characters(text: str, what: str) -> None:
    """Refuses a ``text`` that no encoding holds: JSON may spell half of a character of two units.

    Raises:
        MessageError: naming ``what``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise MessageError(
            f"{what} holds half a character ({half}, place {error.start + 1}); remove or mend it"
        ) from None


def _turn(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"turn {number} is {named(message)}; write an object with 'role' and 'content'")
    if missing := [name for name in ("role", "content") if name not in message]:
        raise MessageError(f"turn {number} has no '{missing[0]}'; write an object with 'role' and 'content'")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        shown = f"role '{role}'" if isinstance(role, str) else f"role, {named(role)}"
        raise MessageError(f"turn {number}: unknown {shown}; use {', '.join(ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise MessageError(f"turn {number}: its content is {named(content)}; write a text or a list of parts")
    return {"role": role, "content": [_part(part, role, number) for part in content]}


def _part(part: Any, role: str, number: int) -> dict[str, str]:
    if not isinstance(part, Mapping) or "type" not in part:
        shown = "has no 'type'" if isinstance(part, Mapping) else f"is {named(part)}"
        raise MessageError(
            f"turn {number}: a part {shown}; write {{'type': 'text', 'text': ...}} or {{'type': 'image'}}"
        )
    kind = part["type"]
    if kind in ("video", "video_url"):
        raise MessageError(f"turn {number}: video is not supported; use its frames")
    if kind in IMAGE_PARTS:
        if role == "assistant":
            raise MessageError(f"turn {number}: a picture in an answer; move it to a turn of the user")
        return {"type": "image"}
    if kind != "text":
        raise MessageError(f"turn {number}: unknown part '{kind}'; use text and image")
    text = part.get("text")
    if not isinstance(text, str):
        shown = f"whose 'text' is {named(text)}" if "text" in part else "without 'text'"
        raise MessageError(f"turn {number}: a text part {shown}; write {{'type': 'text', 'text': ...}}")
    require_characters(text, f"turn {number}")
    return {"type": "text", "text": text}
