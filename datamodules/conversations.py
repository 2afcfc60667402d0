"""Where conversations come from: files of the user's, pictures that the project draws, and the MMSpec benchmark."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from datamodules.conversation_source import ConversationSource, SourceError, content_hash
from datamodules.layouts import conversation_of_record
from fovea.targets.conversation import Conversation
from fovea.targets.messages import MessageError
from fovea.text_files import json_lines, read_json


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
      :class:`~fovea.targets.conversation.Conversation`; all but ``key`` and ``messages`` may be missing. An image part
      may bring its own picture, as for transformers: ``{"type": "image", "path": ...}``, or ``image``, ``url`` or
      ``base64``, or OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}``; ``images`` are those of the others;
    * LLaVA's: ``{"id", "image": path or paths, "conversations": [{"from": "human" | "gpt", "value": ...}]}`` with an
      ``<image>`` in the text where each picture belongs. Its ids repeat within a file, so the key is ``id#line``.

    What is neither, or speaks of a video, becomes a conversation with a :attr:`~Conversation.fault` and the key
    ``file:line``: whatever reads it counts it by that key, with its reason, and goes on.

    Args:
        path: the file.
        image_root: folder that the paths of the pictures are relative to; the file's own folder if None.
        limit: take only the first so many.

    Raises:
        SourceError: for a line that is not JSON or not UTF-8, naming file and line.
    """

    def __init__(self, path: Path | str, image_root: Path | str | None = None, limit: int | None = None):
        self.path = Path(path)
        self.image_root = Path(image_root) if image_root else self.path.parent
        self.limit = limit
        if not self.path.is_file():
            raise FileNotFoundError(f"no conversations at {self.path}: there is no such file")

    def _read(self) -> list[Conversation]:
        found = list(islice(_records(self.path), self.limit))
        self._places = [place for _, place, _ in found]
        return [self._conversation(record, number) for number, _, record in found]

    def _conversation(self, record: Any, number: int) -> Conversation:
        try:
            return conversation_of_record(record, number, self.image_root)
        except MessageError as error:
            return Conversation(f"{self.path.name}:{number}", messages=[], fault=str(error))

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

    Raises:
        SourceError: for a line that is no record, or whose picture does not exist, naming file and line.
    """

    pictures_required = True

    def __init__(self, folder: Path | str, limit: int | None = None, pictures: bool = True):
        self.folder, self.limit, self.pictures = Path(folder), limit, pictures
        self.path = self.folder / "mmspec.jsonl"
        if not self.path.is_file():
            raise FileNotFoundError(f"no MMSpec benchmark in {self.folder}: mmspec.jsonl is missing")

    def _read(self) -> list[Conversation]:
        items, places = [], []
        for _, place, record in _records(self.path):
            if self.limit is not None and len(items) >= self.limit:
                break
            items.append(self._prompt(record, place))
            places.append(place)
        self._places = places
        return items

    def _prompt(self, record: Mapping[str, Any], place: str) -> Conversation:
        try:
            turns = record["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                raise ValueError(f"'turns' must be a list of questions, none of them empty, got {turns!r}")
            first, *others = turns
            image = self.folder / "images" / record["image"]
            shown = [{"type": "image"}] if self.pictures else []
            return Conversation(
                key=str(record["id"]),
                messages=[
                    {"role": "user", "content": [*shown, {"type": "text", "text": first}]},
                    *({"role": "user", "content": text} for text in others),
                ],
                images=(image,) if self.pictures else (),
                source=record["topic"],
                meta={"category": record["category"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{place}: not a record of MMSpec ({error})") from error

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


def _records(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number of each record's line, or its own in an array, where that is in words, and the record."""
    if path.suffix == ".json":
        records = read_json(path, SourceError)
        if not isinstance(records, list):
            raise SourceError(f"{path} must hold an array of conversations, and holds {type(records).__name__}")
        for number, record in enumerate(records, 1):
            yield number, f"{path}, record {number}", record
    else:
        for line, record in json_lines(path, SourceError):
            yield line, f"{path}, line {line}", record
