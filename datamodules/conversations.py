"""Where conversations come from: files of the user's, pictures that the project draws, and the MMSpec benchmark."""

from __future__ import annotations

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fovea.targets.conversation import Conversation
from fovea.targets.images import is_address
from fovea.text_files import json_lines, read_json

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_IMAGE = "<image>"


class SourceError(ValueError):
    """Conversations that cannot be read; the message names file and line."""


class ConversationSource(Sequence[Conversation]):
    """Conversations with unique keys, always in the same order, and a hash that changes when they do."""

    @cached_property
    def _items(self) -> list[Conversation]:
        items = self._read()
        first: dict[str, int] = {}
        for number, item in enumerate(items, 1):
            if item.key in first:
                raise SourceError(
                    f"{self}: conversations {first[item.key]} and {number} have the same key '{item.key}'; "
                    "keys must be unique"
                )
            first[item.key] = number
        return items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    @abstractmethod
    def _read(self) -> list[Conversation]: ...

    @abstractmethod
    def digest(self) -> str:
        """16 hex digits that stand for the conversations in a fingerprint; cheap, draws and opens no picture."""


class TinyConversations(ConversationSource):
    """Pictures that the project draws, with questions about them.

    Args:
        split: "train" or "heldout"; the two share no picture.
        count: conversations.
        seed: of the drawing.
        shown: false asks the questions without showing the pictures.
        pictures: "grids" of up to eight by eight cells, "boards" of three by three, or "banners": boards, and wide and
            tall pictures beside them.

    Raises:
        SourceError: for another split, other pictures or no conversation.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"],
        count: int,
        seed: int = 0,
        shown: bool = True,
        pictures: Literal["grids", "boards", "banners"] = "grids",
    ):
        for name, value, choices in (
            ("split", split, ("train", "heldout")),
            ("pictures", pictures, ("grids", "boards", "banners")),
        ):
            if value not in choices:
                raise SourceError(f"{name} is {value!r}; choose from: {', '.join(choices)}")
        if count < 1:
            raise SourceError(f"count must be at least 1, got {count}")
        self._arguments = (split, count, seed, pictures)
        self.shown = shown

    def _read(self) -> list[Conversation]:
        from fovea.targets.tiny.families import conversations

        read = conversations(*self._arguments)
        return read if self.shown else [_unseen(conversation) for conversation in read]

    def digest(self) -> str:
        """Changes with the arguments and with the code that draws."""
        from fovea.targets.tiny import banners, drawing, families, scenes

        code = (inspect.getsource(module) for module in (drawing, scenes, families, banners))
        return content_hash(f"{self}", *code)

    def __str__(self) -> str:
        return f"TinyConversations{self._arguments}{'' if self.shown else ' without pictures'}"


class JsonlConversations(ConversationSource):
    """Conversations from a file: one JSON object per line, or (``.json``) one array of them.

    Two layouts may be mixed:

    * ours: ``{"key", "messages", "images": [paths], "source", "answer"}`` with the messages of
      :class:`~fovea.targets.conversation.Conversation`; all but ``key`` and ``messages`` may be missing;
    * LLaVA's: ``{"id", "image": path or paths, "conversations": [{"from": "human" | "gpt", "value": ...}]}`` with an
      ``<image>`` in the text where each picture belongs. Its ids repeat within a file, so the key is ``id#line``.

    Args:
        path: the file.
        image_root: folder that the paths of the pictures are relative to; the file's own folder if None.
        limit: take only the first so many.

    Raises:
        SourceError: for a line that is neither layout, naming file and line.
    """

    def __init__(self, path: Path | str, image_root: Path | str | None = None, limit: int | None = None):
        self.path = Path(path)
        self.image_root = Path(image_root) if image_root else self.path.parent
        self.limit = limit
        if not self.path.is_file():
            raise FileNotFoundError(f"no conversations at {self.path}: there is no such file")

    def _read(self) -> list[Conversation]:
        items = []
        for line, record in _records(self.path):
            if self.limit is not None and len(items) >= self.limit:
                break
            try:
                items.append(self._conversation(record, line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                missing = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
                raise SourceError(f"{self.path}, line {line}: {missing}") from error
        return items

    def _conversation(self, record: Mapping[str, Any], line: int) -> Conversation:
        if "conversations" in record:
            return _from_llava(record, line, self.image_root)
        if "messages" not in record:
            raise ValueError(f"needs 'messages' or 'conversations', has {', '.join(sorted(record))}")
        messages = record["messages"]
        images = _located(record.get("images", ()), self.image_root)
        _match_images(messages, images)
        return Conversation(
            key=str(record["key"]),
            messages=messages,
            images=images,
            source=record.get("source", ""),
            answer=record.get("answer"),
        )

    def digest(self) -> str:
        """Changes with the content of the file and the limit; the pictures are hashed when they are exported."""
        return content_hash(f"{self.limit}", self.path.read_bytes())

    def __str__(self) -> str:
        return str(self.path)


class MMSpecConversations(ConversationSource):
    """Prompts of the MMSpec benchmark: a picture and one or several user turns, without answers.

    Args:
        folder: holds ``mmspec.jsonl`` and ``images/``, as its repository lays them out.
        limit: take only the first so many.
        pictures: false asks the texts alone, for targets that read nothing else.
    """

    def __init__(self, folder: Path | str, limit: int | None = None, pictures: bool = True):
        self.folder, self.limit, self.pictures = Path(folder), limit, pictures
        self.path = self.folder / "mmspec.jsonl"
        if not self.path.is_file():
            raise FileNotFoundError(f"no MMSpec benchmark in {self.folder}: mmspec.jsonl is missing")

    def _read(self) -> list[Conversation]:
        return [self._prompt(record, line) for line, record in _records(self.path)][: self.limit]

    def _prompt(self, record: Mapping[str, Any], line: int) -> Conversation:
        try:
            first, *others = record["turns"]
            image = self.folder / "images" / record["image"]
            shown = [{"type": "image"}] if self.pictures else []
            return Conversation(
                key=record["id"],
                messages=[
                    {"role": "user", "content": [*shown, {"type": "text", "text": first}]},
                    *({"role": "user", "content": text} for text in others),
                ],
                images=(image,) if self.pictures else (),
                source=record["topic"],
                meta={"category": record["category"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{self.path}, line {line}: not a record of MMSpec ({error})") from error

    def digest(self) -> str:
        """Changes with the content of the file, the limit and whether there are pictures."""
        return content_hash(f"{self.limit}, {self.pictures}", self.path.read_bytes())

    def __str__(self) -> str:
        return str(self.path)


def _unseen(conversation: Conversation) -> Conversation:
    """``conversation`` without its pictures."""

    def texts(content: Any) -> Any:
        return content if isinstance(content, str) else [part for part in content if part["type"] == "text"]

    messages = [{**message, "content": texts(message["content"])} for message in conversation.messages]
    return replace(conversation, key=f"{conversation.key}-unseen", messages=messages, images=())


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line (or position in the array) and object of each record."""
    if path.suffix == ".json":
        records = read_json(path, SourceError)
        if not isinstance(records, list):
            raise SourceError(f"{path} must hold an array of conversations, and holds {type(records).__name__}")
        yield from enumerate(records, 1)
    else:
        yield from json_lines(path, SourceError)


def _from_llava(record: Mapping[str, Any], line: int, image_root: Path) -> Conversation:
    names = record.get("image") or []
    names = [names] if isinstance(names, str) else names
    messages = []
    for turn in record["conversations"]:
        if turn["from"] not in _ROLES:
            raise ValueError(f"a turn is from '{turn['from']}'; choose from: {', '.join(_ROLES)}")
        role = _ROLES[turn["from"]]
        messages.append({"role": role, "content": _parts(turn["value"]) if role == "user" else turn["value"]})
    images = _located(names, image_root)
    _match_images(messages, images)
    source = Path(urlsplit(names[0]).netloc or names[0]).parts[0] if names else "text"
    meta = {"id": str(record["id"]), "images": list(names)}
    return Conversation(key=f"{record['id']}#{line}", messages=messages, images=images, source=source, meta=meta)


def _located(names: Sequence[str], root: Path) -> tuple[Path | str, ...]:
    """Paths below ``root``; URLs and data URIs as they are."""
    return tuple(name if is_address(name) else root / name for name in names)


def _parts(text: str) -> list[dict[str, str]]:
    """Text with ``<image>`` marks as message parts."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(_IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts


def _match_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Path | str]) -> None:
    contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
    places = sum(part["type"] == "image" for content in contents for part in content)
    if places != len(images):
        raise ValueError(f"{len(images)} images are named, the text has places for {places}")


def content_hash(*parts: str | bytes) -> str:
    """16 hex digits over texts and bytes, one after another."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16]
