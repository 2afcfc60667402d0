"""Records of the authors' own files: JSON in several shapes, JSON lines, and MME's folders of question files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datamodules.benchmarks.entry import Placed
from datamodules.conversation_source import SourceError
from fovea import text_files


def json_list(*keys: str, carried: tuple[str, ...] = (), **constants: Any) -> Callable[[Path], Iterator[Placed]]:
    """Reads the list of objects at ``keys`` in a JSON file.

    Each gets the fields ``constants`` too, and those that the whole file has under the names ``carried``.
    """

    def read(path: Path) -> Iterator[Placed]:
        items = text_files.read_json(path, SourceError)
        common = constants | {name: items[name] for name in carried if name in items}
        for key in keys:
            if not isinstance(items, dict) or key not in items:
                raise SourceError(f"{path}: '{key}' is missing; it is the file of something else")
            items = items[key]
        if not isinstance(items, list):
            raise SourceError(f"{path} must hold a list of records; it is the file of something else")
        for number, item in enumerate(items, 1):
            if not isinstance(item, dict):
                raise SourceError(f"{path}, record {number}: not an object but {type(item).__name__}")
            yield f"record {number}", {**item, **common}

    return read


def json_table(path: Path) -> Iterator[Placed]:
    """Records of a JSON object from identifier to record; the identifier becomes the field ``id``."""
    items = text_files.read_json(path, SourceError)
    if not isinstance(items, dict):
        raise SourceError(f"{path} must hold an object of records; it is the file of something else")
    for name, item in items.items():
        if not isinstance(item, dict):
            raise SourceError(f"{path}, record '{name}': not an object but {type(item).__name__}")
        yield f"record '{name}'", {"id": name, **item}


def json_lines(path: Path) -> Iterator[Placed]:
    """Records of a file with a JSON object a line."""
    for line, record in text_files.json_lines(path, SourceError):
        if not isinstance(record, dict):
            raise SourceError(f"{path}, line {line}: not an object but {type(record).__name__}")
        yield f"line {line}", record


def science_qa(path: Path) -> Iterator[Placed]:
    """ScienceQA's ``problems.json``; a problem of the split S has its picture at ``S/<id>/image.png``."""
    for place, record in json_table(path):
        if "split" not in record:
            raise SourceError(f"{path}, {place}: 'split' is missing; it has {', '.join(sorted(record))}")
        name = record.get("image")
        yield place, {**record, "image": f"{record['split']}/{record['id']}/{name}" if name else None}


def mme(path: Path) -> Iterator[Placed]:
    """One of MME's question files: two lines of question, tab and answer about the picture of the same name.

    The picture lies beside it, or in ``images`` beside ``questions_answers_YN``.
    """
    apart = path.parent.name == "questions_answers_YN"
    category, folder = (path.parents[1].name, path.parents[1] / "images") if apart else (path.parent.name, path.parent)
    pictures = [folder / f"{path.stem}{suffix}" for suffix in (".jpg", ".png", ".jpeg")]
    picture = next((name for name in pictures if name.is_file()), pictures[0])
    for line, text in text_files.text_lines(path, SourceError):
        if text.strip():
            question, tab, answer = text.partition("\t")
            if not tab:
                raise SourceError(f"{path}, line {line}: not a question, a tab and an answer")
            record = {
                "question_id": f"{category}/{picture.name}",
                "question": question,
                "answer": answer.strip(),
                "category": category,
                "image": str(picture.absolute()),
            }
            yield f"line {line}", record
