"""Files of a mixture; the same mixture gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datamodules.mixture.official import official_ids
from datamodules.mixture.prints import Print
from datamodules.mixture.recipe import Mixture
from fovea.targets.conversation import Conversation, StoredImage
from fovea.targets.images import image_bytes

#: Folder of the manifests in that of a mixture.
MANIFESTS = "manifests"


def write(mixture: Mixture, folder: Path) -> None:
    """Writes a file of conversations and a manifest per split, and the pictures that lie in tables.

    ``train.jsonl`` is what ``data.path`` takes, ``evaluation-<benchmark>.jsonl`` what ``benchmark=jsonl
    benchmark.path=`` does. A line of ``manifests/<split>.jsonl`` holds ``source``, ``key``, ``ids`` (official
    identifiers), ``images`` (hashes of their pixels), ``looks`` (perceptual hashes; null of a plain picture) and
    ``split``. ``dropped.jsonl`` says what was left out of which split and why, ``perceptual.jsonl`` which pictures to
    train look like one to evaluate, and in how many bits of 64 their perceptual hashes differ; those stay.
    """
    (folder / MANIFESTS).mkdir(parents=True, exist_ok=True)
    for split, items in mixture.splits.items():
        _lines(folder / f"{split}.jsonl", (_record(item, folder) for item in items))
        prints = ([mixture.prints(image) for image in item.images] for item in items)
        entries = (_entry(item, known, split) for item, known in zip(items, prints, strict=True))
        _lines(folder / MANIFESTS / f"{split}.jsonl", entries)
    _lines(folder / "dropped.jsonl", map(asdict, mixture.refused))
    _lines(folder / "perceptual.jsonl", mixture.look_alikes)


def _entry(item: Conversation, prints: list[Print], split: str) -> dict[str, Any]:
    return {
        "source": item.source,
        "key": item.key,
        "ids": official_ids(item),
        "images": [known.pixels for known in prints],
        "looks": [None if known.look is None else f"{known.look:016x}" for known in prints],
        "split": split,
    }


def _record(item: Conversation, folder: Path) -> dict[str, Any]:
    """The layout of :class:`~datamodules.conversations.JsonlConversations`; pictures in tables become files."""
    images = []
    for image in item.images:
        if isinstance(image, StoredImage):
            content = image_bytes(image)
            path = folder / "images" / item.source / f"{hashlib.sha256(content).hexdigest()[:16]}.img"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            images.append(str(path.relative_to(folder)))
        else:
            images.append(str(image))
    return {"key": item.key, "messages": item.messages, "images": images, "source": item.source}


def _lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
