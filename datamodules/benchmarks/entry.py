"""What is particular to a benchmark: where its files lie, and which field of a record is what.

``A.`` to ``Z.`` stand before the options, one a line, as LLaVA's evaluation writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.benchmarks.options import text_of
from datamodules.conversation_source import SourceError
from fovea.targets.conversation import StoredImage

Record = Mapping[str, Any]
#: The name of a field, or what finds it in a record.
Getter = str | Callable[[Record], Any]
#: A record and where it stands in its file, in words: its line, or its number or name where lines say nothing.
Placed = tuple[str, Record]

#: In the place of an instruction: what the benchmark's authors ask for.
PUBLISHED = "published"


@dataclass(frozen=True)
class Layout:
    """Files as the authors publish them.

    Attributes:
        pattern: of the annotation files below the folder, for people too; ``{split}`` stands for the split.
        read: gives the records of one of them.
        beside: folder of other files that the pattern would find too.
    """

    pattern: str
    read: Callable[[Path], Iterator[Placed]]
    beside: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; a getter that finds nothing raises KeyError and the record is refused by name.

    Attributes:
        title: as its authors write it.
        question: text of the question.
        pictures: names of the files that the question is about, if no table holds the pictures themselves.
        stored: columns of a table that hold pictures, in order.
        layouts: files of the authors, beside the tables that every benchmark may be in; all that are there are read.
        roots: folders of the pictures, relative to the annotation file; the first that holds one is taken.
        key: the authors' identifier; the record's number if None.
        shared: whether several questions have one identifier; they are told apart by their number then.
        context: what stands before the question.
        options: texts to choose from; see :func:`~datamodules.benchmarks.options.choices`.
        answer: the right answer.
        category: what the authors report apart.
        keep: which records are prompts at all, such as those without a video.
        split: field that says which split a record of a file for all splits belongs to.
        marks: where a picture stands inside the text: a pattern whose group is the picture's number, from 1, or that
            has no group if they stand in order. Pictures without a mark stand before the text.
        asks: the authors' request for a short answer; taken out of the question if it stands there.
        prompt: the whole text as the authors ask it, if it is published.
    """

    title: str
    question: Getter
    pictures: Getter | None = None
    stored: Sequence[str] = ("image",)
    layouts: Sequence[Layout] = ()
    roots: Sequence[str] = ("",)
    key: Getter | None = None
    shared: bool = False
    context: Getter | None = None
    options: Callable[[Record], Sequence[str]] | None = None
    answer: Getter | None = None
    category: Getter | None = None
    keep: Callable[[Record], bool] = field(default=lambda record: True)
    split: str | None = None
    marks: re.Pattern[str] | None = None
    asks: str = ""
    prompt: Getter | None = None

    def text(self, record: Record, instruction: str | None, options: bool) -> str:
        """What is asked: context, question, options and instruction, a line each.

        The instruction stands in the place of the authors' request for a short answer; "published" takes that one,
        None leaves it out.

        Raises:
            KeyError: a field is missing.
            ValueError: there is no question, or an option of it is missing.
        """
        if instruction == PUBLISHED and self.prompt is not None:
            return _asked(get(record, self.prompt)).strip()
        question = _asked(get(record, self.question))
        if self.asks:
            question = question.replace(self.asks, "")
        choices = self.options(record) if options and self.options is not None else []
        lines = [
            *present([get(record, self.context)] if self.context is not None else []),
            question.strip(),
            *(f"{chr(ord('A') + place)}. {choice}" for place, choice in enumerate(choices)),
            *present([self.asks if instruction == PUBLISHED else instruction]),
        ]
        return "\n".join(lines)

    def images(self, record: Record, folder: Path) -> tuple[StoredImage | Path, ...]:
        """The pictures of a record in order; ``folder`` holds the annotation file.

        Raises:
            KeyError: no field of the record is for pictures.
        """
        stored = [column for column in self.stored if _is_stored(record.get(column))]
        if stored:
            return tuple(image for column in stored for image in record[column])
        if any(isinstance(record.get(column), list) for column in self.stored):
            return ()
        if self.pictures is None:
            raise KeyError(" or ".join(self.stored))
        names = get(record, self.pictures) or ()
        return tuple(self._located(name, folder) for name in ([names] if isinstance(names, str) else names))

    def names(self, record: Record, images: Sequence[StoredImage | Path]) -> list[str | None]:
        """What the authors call each of ``images``; None where neither the record nor its table tells."""
        try:
            named = get(record, self.pictures) if self.pictures is not None else ()
        except (KeyError, TypeError, ValueError):  # a table may lack what the authors' files have
            named = ()
        listed = [named] if isinstance(named, str) else named or ()
        texts = [name for name in listed if isinstance(name, str)]
        if len(texts) == len(images):
            return [*texts]
        return [image.origin if isinstance(image, StoredImage) else str(image) for image in images]

    def _located(self, name: str, folder: Path) -> Path:
        places = [folder / root / name for root in self.roots]
        return next((place for place in places if place.is_file()), places[0])

    def content(self, text: str, images: int) -> tuple[list[dict[str, str]], list[int]]:
        """Message parts, and which picture stands in each image part, from 0.

        Raises:
            ValueError: the text marks a picture that is not there.
        """
        parts: list[dict[str, str]] = []
        order: list[int] = []
        end = 0
        for mark in self.marks.finditer(text) if self.marks else ():
            number = int(mark[1]) - 1 if mark.re.groups else len(order)
            if number in order:
                continue  # shown already; the text goes on speaking of it
            if not 0 <= number < images:
                raise ValueError(f"the text speaks of picture {number + 1}, and there are {images}")
            parts += [*_text_part(text[end : mark.start()]), {"type": "image"}]
            order.append(number)
            end = mark.end()
        parts += _text_part(text[end:])
        before = [number for number in range(images) if number not in order]
        return [{"type": "image"}] * len(before) + parts, before + order


def get(record: Record, getter: Getter) -> Any:
    """The value of a field.

    Raises:
        KeyError: there is none.
    """
    return record[getter] if isinstance(getter, str) else getter(record)


def first(*names: str) -> Callable[[Record], Any]:
    """Finds the first of ``names`` that a record has: layouts of one benchmark call a field differently."""

    def found(record: Record) -> Any:
        for name in names:
            if name in record:
                return record[name]
        raise KeyError(" or ".join(names))

    return found


def present(values: Iterable[Any]) -> Iterator[str]:
    """Texts among ``values``."""
    return (text for value in values if (text := text_of(value)))


def refuse(where: str, title: str, record: Record, error: Exception) -> SourceError:
    """The error of a record that is none of the benchmark's."""
    if isinstance(error, KeyError):
        fields = ", ".join(sorted(map(str, record))) if isinstance(record, Mapping) else "no fields"
        return SourceError(f"{where}: not a record of {title} ('{error.args[0]}' is missing; it has {fields})")
    return SourceError(f"{where}: not a record of {title} ({error})")


def _asked(question: Any) -> str:
    if question is None or not str(question).strip():
        raise ValueError(f"the question is {'null' if question is None else 'empty'}; mend the record or take it out")
    return str(question)


def _is_stored(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], StoredImage)


def _text_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text.strip("\n")}] if text.strip() else []
