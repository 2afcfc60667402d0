"""What every source of conversations promises: unique keys, a fixed order, a digest, an account of what was read."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.targets.conversation import Conversation

logger = logging.getLogger(__name__)


class SourceError(ValueError):
    """Conversations that cannot be read; the message names file and line."""


class ConversationSource(Sequence[Conversation]):
    """Conversations with unique keys, always in the same order, and a hash that changes when they do.

    Attributes:
        limit: only the first so many are taken; None takes all.
        pictures_required: whether reading it refuses a conversation whose picture is a file that does not exist.
    """

    limit: int | None = None
    pictures_required = False
    #: Where each conversation stands, such as file and line. Whoever reads files sets it, and is told of.
    _places: Sequence[str] = ()
    #: Records that are no conversations, by the reason.
    _left_out: Mapping[str, int] = MappingProxyType({})

    @cached_property
    def _items(self) -> list[Conversation]:
        items = self._read()
        first: dict[str, int] = {}
        for index, item in enumerate(items):
            if item.key in first:
                raise SourceError(
                    f"{self._place(index)}: the key '{item.key}' is that of {self._place(first[item.key])} already; "
                    "keys must be unique, so rename one of the two or take it out"
                )
            first[item.key] = index
        if self.pictures_required:
            self._require_pictures(items)
        if self._places:
            logger.info("%s: %s", self, self._account(len(items)))
        if faulty := [item for item in items if item.fault]:
            logger.warning(
                "%s: %d of %d conversations cannot be used; the first is '%s': %s",
                *(self, len(faulty), len(items), faulty[0].key, faulty[0].fault),
            )
        return items

    def counts(self) -> dict[str, int]:
        """Records that were read and kept, and those left out by the reason; the rest behind a limit is in none."""
        kept = len(self)
        return {"read": kept + sum(self._left_out.values()), "kept": kept, **self._left_out}

    def require_pictures(self) -> None:
        """Refuses pictures that are no files, where reading the source does not do so already.

        Raises:
            SourceError: one is missing; the message names where it is asked for, and how many others there are.
        """
        items = self._items
        if not self.pictures_required:
            self._require_pictures(items)

    def _require_pictures(self, items: Sequence[Conversation]) -> None:
        missing = [
            (index, image)
            for index, item in enumerate(items)
            for image in item.images
            if isinstance(image, Path) and not image.is_file()
        ]
        if missing:
            index, image = missing[0]
            lacking = len({index for index, _ in missing})
            raise SourceError(
                f"{self._place(index)}: the picture '{image}' does not exist ({lacking} of {len(items)} records lack "
                "one); put it there, or correct the folder of the pictures"
            )

    def _place(self, index: int) -> str:
        return self._places[index] if self._places else f"{self}, conversation {index + 1}"

    def _account(self, kept: int) -> str:
        read = kept + sum(self._left_out.values())
        cut = f" (limit={self.limit}: what follows was not read)" if kept == self.limit else ""
        reasons = "".join(f", {count:,} left out {reason}" for reason, count in self._left_out.items())
        return f"{read:,} records read, {kept:,} kept{cut}{reasons}"

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    @abstractmethod
    def _read(self) -> list[Conversation]: ...

    @abstractmethod
    def digest(self) -> str:
        """16 hex digits that stand for the conversations in a fingerprint; cheap, draws and opens no picture."""


def content_hash(*parts: str | bytes) -> str:
    """16 hex digits over texts and bytes, one after another."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16]
