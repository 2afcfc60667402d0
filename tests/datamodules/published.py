"""Tiny benchmarks in the layouts in which the real ones are published; every picture is a plain colour of its own."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from PIL import Image

from datamodules.benchmarks import BenchmarkConversations
from fovea.app.errors import cause
from fovea.app.launch import CONFIG_DIR
from fovea.app.sources import source
from fovea.targets.conversation import Conversation
from fovea.targets.images import open_image

EXPLAIN = "Please give a detailed and reasonable explanation for the answer."
LETTER = "Answer with the option's letter from the given choices directly."
SHORT = "Answer the question using a single word or phrase."


def read(name: str, folder: Path | str | None, *overrides: str) -> BenchmarkConversations:
    """The source that ``benchmark=<name> benchmark.folder=<folder>`` makes."""
    where = "null" if folder is None else f"'{folder}'"
    typed = [f"benchmark={name}", f"benchmark.folder={where}", *(f"benchmark.{o}" for o in overrides)]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("evaluate", overrides=typed)
    try:
        return source(cfg, "benchmark.conversations")
    except InstantiationException as error:
        raise cause(error) from error


def shown(item: Conversation) -> str:
    """The user's turn, with the number of each picture where it stands."""
    (message,) = item.messages
    assert message["role"] == "user"
    numbers = iter([open_image(image).convert("L").getpixel((0, 0)) for image in item.images])
    parts = [part["text"] if part["type"] == "text" else f"[{next(numbers)}]" for part in message["content"]]
    assert next(numbers, None) is None
    return "".join(parts)


def summary(items: Any) -> list[tuple]:
    """Key, source, turn and answer of each."""
    return [(item.key, item.source, shown(item), item.answer) for item in items]


def picture(number: int) -> bytes:
    """The encoded picture of ``number``: 2 x 2 pixels of grey value ``number``."""
    content = io.BytesIO()
    Image.new("RGB", (2, 2), (number, number, number)).save(content, "PNG")
    return content.getvalue()


def text(number: int) -> str:
    """The picture of ``number`` in base64."""
    return base64.b64encode(picture(number)).decode()


def put(path: Path, number: int) -> None:
    """A picture file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number))


def put_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def put_tsv(path: Path, *records: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def table(records: list[dict], *pictures: str, **features: Any) -> Any:
    """A data set as the hub publishes it; the columns ``pictures`` hold numbers of pictures, lists of them or None."""
    import datasets

    def stored(value: int | list[int] | None) -> Any:
        if isinstance(value, list):
            return [stored(number) for number in value]
        return None if value is None else {"bytes": picture(value), "path": None}

    rows = [{name: stored(v) if name in pictures else v for name, v in record.items()} for record in records]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    made = datasets.Dataset.from_dict(columns)
    for name in pictures:
        several = any(isinstance(record[name], list) for record in records)
        made = made.cast_column(name, datasets.List(datasets.Image()) if several else datasets.Image())
    for name, feature in features.items():
        made = made.cast_column(name, feature)
    return made


def put_parquet(path: Path, records: list[dict], *pictures: str, **features: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table(records, *pictures, **features).to_parquet(path)
