"""The layouts of a conversation in a file, ours and LLaVA's: from what JSON holds to turns and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.targets.conversation import Conversation
from fovea.targets.images import is_address
from fovea.targets.messages import IMAGE_PARTS, MessageError, checked_turns, named, require_characters

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_IMAGE = "<image>"
#: Where a part of a message may hold its own picture, as for transformers.
_PICTURES = ("image", "url", "path", "base64", "image_url")
#: Fields of a record that hold what no target here reads.
_NOT_READ = ("video", "videos", "audio", "audios")


def conversation_of_record(record: Any, line: int, image_root: Path) -> Conversation:
    """The conversation in ``record``, which stands at ``line`` of a file in one of the two layouts.

    Raises:
        MessageError: there is none; the message says why.
    """
    if not isinstance(record, Mapping):
        raise MessageError(f"it is {named(record)}, not an object")
    for name in _NOT_READ:
        if record.get(name):
            raise MessageError(f"it has '{name}', which is not supported; use images, of a video its frames")
    if "conversations" in record:
        return _theirs(record, line, image_root)
    if "messages" not in record:
        raise MessageError(f"needs 'messages' or 'conversations', has {', '.join(sorted(record)) or 'nothing'}")
    return _ours(record, image_root)


def _ours(record: Mapping[str, Any], image_root: Path) -> Conversation:
    key, source, answer = _key(record, "key"), record.get("source"), record.get("answer")
    for name, value in (("source", source), ("answer", answer)):
        if not isinstance(value, str | int | float | None):
            raise MessageError(f"'{name}' is {named(value)}; write a text")
    named_images = iter(_image_names(record, "images"))
    images: list[str] = []
    messages = record["messages"]
    for part in _image_parts(messages):
        own = _own_picture(part)
        if own or (own := next(named_images, "")):
            images.append(own)
    left = list(named_images)
    turns = checked_turns(messages, len(images) + len(left))
    return Conversation(
        key=key,
        messages=[_plain(turn, message["content"]) for turn, message in zip(turns, messages, strict=True)],
        images=_located(images, image_root),
        source="" if source is None else str(source),
        answer=None if answer is None else str(answer),
    )


def _theirs(record: Mapping[str, Any], line: int, image_root: Path) -> Conversation:
    key, turns = _key(record, "id"), record["conversations"]
    names = _image_names(record, "image") or _image_names(record, "images")
    if not isinstance(turns, list):
        raise MessageError(f"'conversations' is {named(turns)}; write a list of turns")
    messages = []
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        text = turn.get("value") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise MessageError(f"turn {number} is no object with the texts 'from' and 'value'")
        if speaker not in _ROLES:
            raise MessageError(f"turn {number} is from '{speaker}'; choose from: {', '.join(_ROLES)}")
        role = _ROLES[speaker]
        messages.append({"role": role, "content": _parts(text) if role == "user" else text})
    checked_turns(messages, len(names))
    meta = {"id": key, "images": names}
    return Conversation(f"{key}#{line}", messages, _located(names, image_root), _source(names), meta=meta)


def _key(record: Mapping[str, Any], name: str) -> str:
    key = record.get(name)
    if key is None or key == "":
        raise MessageError(f"'{name}' is missing; name the conversation")
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise MessageError(f"'{name}' is {named(key)}; write a text or a number")
    require_characters(str(key), f"'{name}'")
    return str(key)


def _image_names(record: Mapping[str, Any], name: str) -> list[str]:
    """The pictures that a field names, one or a list of them."""
    names = record.get(name)
    if names is None or names == "":
        return []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        wrong = next((one for one in names if not isinstance(one, str)), names) if isinstance(names, list) else names
        raise MessageError(f"'{name}' holds {named(wrong)}; write a path, a URL, or a list of them")
    return names


def _image_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """The parts that stand for a picture, in whatever ``messages`` is; its form is checked elsewhere."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                yield part


def _own_picture(part: Mapping[str, Any]) -> str:
    """Path, URL or data URI of the picture that a part brings along; empty if it brings none."""
    for name in _PICTURES:
        value = part.get(name)
        value = value.get("url") if name == "image_url" and isinstance(value, Mapping) else value
        if value is not None:
            if not isinstance(value, str):
                raise MessageError(f"the '{name}' of an image part is {named(value)}; write a path or a URL")
            return f"data:image/*;base64,{value}" if name == "base64" and not is_address(value) else value
    return ""


def _plain(turn: Mapping[str, Any], content: Any) -> dict[str, Any]:
    """A turn of which the pictures were taken; a text stays one."""
    return {"role": turn["role"], "content": content if isinstance(content, str) else turn["content"]}


def _located(names: list[str], root: Path) -> tuple[Path | str, ...]:
    """Paths below ``root``; URLs and data URIs as they are."""
    return tuple(name if is_address(name) else root / name for name in names)


def _source(names: list[str]) -> str:
    """The first folder or the host of the first picture."""
    if not names:
        return "text"
    first = names[0]
    if is_address(first):
        scheme, _, rest = first.partition(":")
        return (rest.lstrip("/").split("/")[0] if scheme.lower() in ("http", "https") else "") or scheme.lower()
    return next(iter(Path(first).parts), "text")


def _parts(text: str) -> list[dict[str, str]]:
    """Text with ``<image>`` marks as message parts."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(_IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts
