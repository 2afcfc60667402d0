"""Keeping what is evaluated on out of the training, and saying what was refused and what only looks alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.mixture.official import official_ids
from datamodules.mixture.prints import Prints, alike
from fovea.targets.conversation import Conversation
from fovea.targets.images import BrokenImageError

#: Kinds of refusal.
EVALUATED, BROKEN, TEXT = "evaluated on", "with a broken picture", "without a picture"


@dataclass(frozen=True)
class Refusal:
    """Why a conversation was left out of ``split``; ``kind`` is what such refusals are counted by."""

    split: str
    source: str
    key: str
    kind: str
    reason: str


@dataclass
class Part:
    """What one data set gives to one split.

    Attributes:
        read: conversations in its files.
        wanted: those that the split should have.
        drawn: those that were looked at.
    """

    name: str
    split: str
    read: int
    wanted: int
    drawn: int = 0
    kept: list[Conversation] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)

    def refuse(self, item: Conversation, kind: str, reason: str) -> None:
        """Leaves ``item`` out."""
        self.refused.append(Refusal(self.split, item.source, item.key, kind, reason))

    def __str__(self) -> str:
        """A line of counts."""
        counts = {kind: sum(refusal.kind == kind for refusal in self.refused) for kind in (TEXT, EVALUATED, BROKEN)}
        left_out = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        short = self.wanted - len(self.kept)
        return (
            f"{self.split}, {self.name}: {self.read} read, {self.drawn} drawn, {len(self.kept)} kept"
            + (f"; refused: {left_out}" if left_out else "")
            + (f"; {short} short of {self.wanted}" if short > 0 else "")
        )


class Evaluated:
    """What is evaluated on: identifiers and pixels, each with the key of a conversation that has it."""

    def __init__(self, prints: Prints) -> None:
        self._prints = prints
        self._ids: dict[str, str] = {}
        self._pixels: dict[str, str] = {}

    def add(self, part: Part, items: Iterable[Conversation]) -> None:
        """Puts ``items`` into the evaluation part, but for those with a broken picture; their identifiers count."""
        for item in items:
            part.drawn += 1
            for name in official_ids(item):
                self._ids.setdefault(name, item.key)
            try:
                prints = [self._prints(image) for image in item.images]
            except BrokenImageError as error:
                part.refuse(item, BROKEN, str(error))
                continue
            for known in prints:
                self._pixels.setdefault(known.pixels, item.key)
            part.kept.append(item)

    def fill(self, part: Part, candidates: Iterable[Conversation]) -> None:
        """Puts as many of ``candidates`` as are wanted into the training part, in order, if none of it is here."""
        for item in candidates if len(part.kept) < part.wanted else ():
            part.drawn += 1
            try:
                why = self._why(item)
            except BrokenImageError as error:
                part.refuse(item, BROKEN, str(error))
                continue
            if why:
                part.refuse(item, EVALUATED, why)
                continue
            part.kept.append(item)
            if len(part.kept) == part.wanted:
                return

    def _why(self, item: Conversation) -> str | None:
        for name in official_ids(item):
            if name in self._ids:
                return f"'{name}' is that of {self._ids[name]}"
        for image in item.images:
            if (pixels := self._prints(image).pixels) in self._pixels:
                return f"its picture is that of {self._pixels[pixels]}"
        return None


def look_alikes(
    train: Sequence[Conversation], evaluation: dict[str, list[Conversation]], prints: Prints
) -> Iterator[dict[str, Any]]:
    """Pictures to train that look like one to evaluate, such as a smaller copy: a record for each pair of pictures."""
    ours = [(item, *look) for item in train for look in _looks(item, prints)]
    # A picture that many ask about is named once, with the first that does.
    theirs: dict[str, tuple[str, str, int]] = {}
    for split, items in evaluation.items():
        for item in items:
            for pixels, look in _looks(item, prints):
                theirs.setdefault(pixels, (split, item.key, look))
    held = list(theirs.items())
    for own, other, bits in alike([look for *_, look in ours], [look for _, (*_, look) in held]):
        (item, pixels, _), (seen, (split, key, _)) = ours[own], held[other]
        yield {
            **{"source": item.source, "key": item.key, "image": pixels},
            **{"split": split, "evaluated_key": key, "evaluated_image": seen, "bits": bits},
        }


def _looks(item: Conversation, prints: Prints) -> Iterator[tuple[str, int]]:
    """Pixels and look of the pictures of ``item`` that have a look."""
    for known in map(prints, item.images):
        if known.look is not None:
            yield known.pixels, known.look
