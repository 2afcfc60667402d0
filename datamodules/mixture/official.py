"""Identifiers that data sets share: of samples, and of pictures by the collection that they come from.

A picture of COCO is ``000000033471.jpg`` here and ``COCO_val2014_000000033471.jpg`` there, and one of Visual Genome
lies in ``vg/VG_100K``, or in ``gqa/images`` under the same number. (Half of Visual Genome are pictures of COCO under
other numbers, which only their pixels tell.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from fovea.targets.conversation import Conversation, StoredImage

_COCO = re.compile(r"coco_(?:train|val|test)20\d\d_(\d+)")
#: Folders that name the collection of the pictures below them.
_FOLDERS = {
    "coco": (
        "coco",
        "mscoco",
        *(f"{split}{year}" for split in ("train", "val", "test") for year in (2014, 2015, 2017)),
    ),
    "vg": ("vg", "vg_100k", "vg_100k_2", "gqa", "visual_genome", "visualgenome"),
}
#: TextVQA and TextCaps have those of OpenImages.
_OPEN_IMAGES = re.compile(r"[0-9a-f]{16}")
#: Characters, and digits without leading zeros, of a name that two data sets would not give by chance, as they do
#: ``12.jpg``, ``screenshot.png`` or ``question_0012.png``.
_CHARACTERS, _DIGITS = 8, 6


def official_ids(item: Conversation) -> list[str]:
    """The identifiers of a conversation, its sample's first; two that share one are about the same thing.

    Names of pictures are taken from ``meta["images"]``, or else from the paths.
    """
    names = item.meta.get("images") or [None if isinstance(i, StoredImage) else str(i) for i in item.images]
    sample = item.meta.get("id")
    found = [f"{item.source}/{sample}" if sample is not None else item.key]
    if sample is not None:
        found += _picture(f"{item.source}/{sample}")  # LLaVA names samples by their pictures
    for name in names:
        found += _picture(name or "")
    return list(dict.fromkeys(found))


def _picture(name: str) -> Iterator[str]:
    """``coco:33471`` of ``coco/train2017/000000033471.jpg``; nothing if the name says nothing elsewhere."""
    if name.startswith("data:"):
        return
    path = PurePosixPath((urlsplit(name).path if "://" in name else name).replace("\\", "/").lower())
    stem, above = path.stem, path.parts[-4:-1]  # further up are folders of the user's
    if match := _COCO.fullmatch(stem):
        yield f"coco:{int(match[1])}"
    elif re.fullmatch(r"0\d{11}", stem):
        yield f"coco:{int(stem)}"
    elif _OPEN_IMAGES.fullmatch(stem):
        yield f"openimages:{stem}"
    elif stem.isascii() and stem.isdigit() and (kinds := [k for k, names in _FOLDERS.items() if {*above} & {*names}]):
        yield f"{kinds[0]}:{int(stem)}"
    elif len(stem) >= _CHARACTERS and sum(map(len, re.findall(r"[1-9]\d*", stem))) >= _DIGITS:
        yield f"name:{stem}"
