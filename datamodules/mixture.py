"""The training mixture of the FOVEA paper (section 4.1, Table 6): ``python -m datamodules.mixture --help``.

55,000 shuffled conversations of LLaVA-v1.5-mix665k, of which those without a picture are dropped (DREAM's recipe; the
paper counts 51,671), and 1,000 of each of six benchmarks. Four of the benchmarks are split here, as
``train_test_split(random_state=42)`` splits them: 1,000 to train and up to 3,000 of the others to evaluate; of ChartQA
and ScienceQA 1,000 of the official training split are drawn. Conversations of LLaVA whose picture is in an evaluation
manifest, by its official name or by its pixels, are dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.benchmarks import BenchmarkConversations
from datamodules.conversations import JsonlConversations, MMSpecConversations, SourceError
from fovea.targets.conversation import Conversation, ImageSource, StoredImage
from fovea.targets.images import BrokenImageError, image_bytes, open_image

#: Of every split and shuffle.
SEED = 42
#: Conversations of LLaVA before those without a picture are dropped; samples of a benchmark to train and to evaluate.
LLAVA, TRAIN, EVALUATION = 55_000, 1_000, 3_000
#: Splits, put together, of each benchmark that is split here; MathVista's testmini alone has but 1,000.
SPLIT_HERE = {
    "mmt_bench": ("ALL",),
    "seed_bench_2": ("test",),
    "mathvista": ("testmini", "test"),
    "ocrbench_v2": ("test",),
}
#: Official training and evaluation splits of the others.
OFFICIAL = {"scienceqa": ("train", "test"), "chartqa": ("train", "test")}
#: Benchmarks that are only evaluated, and their splits.
ONLY_EVALUATED = {"textvqa": "val", "mme": "test"}
#: Only evaluated too, and read in a layout of its own.
MMSPEC = "mmspec"
#: A shorter file name, such as 12.jpg, is no identifier that two data sets would share.
_SHORTEST_NAME = 8


@dataclass(frozen=True)
class Mixture:
    """What was built: conversations to train on, and those to evaluate on, by benchmark.

    Attributes:
        train: LLaVA's part, then the benchmarks'.
        llava: how many of ``train`` are LLaVA's.
        dropped: key and reason of what LLaVA's part lost to decontamination or to broken pictures.
    """

    train: list[Conversation]
    llava: int
    evaluation: dict[str, list[Conversation]]
    dropped: dict[str, str]


def train_test_split(count: int, train: int, test: int) -> tuple[list[int], list[int]]:
    """Indices of both parts, equal to those of scikit-learn's function of that name with ``random_state=42``.

    Raises:
        SourceError: there are fewer than ``train``.
    """
    if count <= train:
        raise SourceError(f"{count} samples cannot give {train} to train and others to evaluate")
    order = np.random.RandomState(SEED).permutation(count)
    test = min(test, count - train)
    return order[test : test + train].tolist(), order[:test].tolist()


def build(llava: Sequence[Conversation], benchmarks: dict[str, Path], sizes: tuple[int, int, int]) -> Mixture:
    """The mixture of LLaVA's conversations and of the benchmarks at hand, by name and folder.

    Args:
        llava: all of LLaVA-v1.5-mix665k.
        benchmarks: any of those above.
        sizes: conversations of LLaVA, samples of a benchmark to train, and at most to evaluate.

    Raises:
        SourceError: a benchmark cannot be read, is too small, or has no place in the mixture.
    """
    taken, train, test = sizes
    parts: list[Conversation] = []
    evaluation: dict[str, list[Conversation]] = {}
    for name, folder in benchmarks.items():
        if name in SPLIT_HERE:
            items = [item for split in SPLIT_HERE[name] for item in _read(name, folder, split)]
            kept, held = train_test_split(len(items), train, test)
            parts += [items[index] for index in kept]
            evaluation[name] = [items[index] for index in held]
        elif name in OFFICIAL:
            learned, judged = (_read(name, folder, split) for split in OFFICIAL[name])
            kept = np.random.RandomState(SEED).permutation(len(learned))[:train]
            parts += [learned[index] for index in kept.tolist()]
            evaluation[name] = list(judged)
        elif name in ONLY_EVALUATED:
            evaluation[name] = list(_read(name, folder, ONLY_EVALUATED[name]))
        elif name == MMSPEC:
            evaluation[name] = list(MMSpecConversations(folder))
        else:
            known = ", ".join(sorted([*SPLIT_HERE, *OFFICIAL, *ONLY_EVALUATED, MMSPEC]))
            raise SourceError(f"'{name}' has no place in the mixture; choose from: {known}")
    order = np.random.default_rng(SEED).permutation(len(llava))[:taken].tolist()
    drawn = [llava[index] for index in order if llava[index].images]
    kept, dropped = decontaminate(drawn, [item for items in evaluation.values() for item in items])
    return Mixture([*kept, *parts], len(kept), evaluation, dropped)


def decontaminate(
    items: Iterable[Conversation], evaluation: Iterable[Conversation]
) -> tuple[list[Conversation], dict[str, str]]:
    """``items`` whose pictures are not those of ``evaluation``, and why each of the others was dropped.

    Pictures are the same if their official file names are (without folder and suffix), or their pixels.
    """
    names: dict[str, str] = {}
    pixels: dict[str, str] = {}
    for item in evaluation:
        for image in item.images:
            names.setdefault(_name(image), item.key)
            pixels.setdefault(picture_hash(image), item.key)
    names.pop("", None)
    kept, dropped = [], {}
    for item in items:
        try:
            same = [names[name] for image in item.images if (name := _name(image)) in names]
            same = same or [pixels[found] for image in item.images if (found := picture_hash(image)) in pixels]
        except BrokenImageError as error:
            dropped[item.key] = str(error)
            continue
        if same:
            dropped[item.key] = f"its picture is that of {same[0]}"
        else:
            kept.append(item)
    return kept, dropped


def picture_hash(image: ImageSource) -> str:
    """16 hex digits over a picture's size and upright RGB pixels, however it is encoded."""
    decoded = open_image(image)
    return hashlib.sha256(f"{decoded.size}".encode() + decoded.tobytes()).hexdigest()[:16]


def write(mixture: Mixture, folder: Path) -> None:
    """Writes a file of conversations and a manifest per split, and the pictures that lie in tables.

    The same mixture gives the same bytes. ``train.jsonl`` is what ``data.path`` takes, ``evaluation-<benchmark>.jsonl``
    what ``benchmark=jsonl benchmark.path=`` does. A line of ``manifests/<split>.jsonl`` holds ``source``, ``key``,
    ``images`` (hashes of their pixels) and ``split``.
    """
    (folder / "manifests").mkdir(parents=True, exist_ok=True)
    parts = {"train": mixture.train} | {f"evaluation-{name}": items for name, items in mixture.evaluation.items()}
    for split, items in parts.items():
        _lines(folder / f"{split}.jsonl", (_record(item, folder) for item in items))
        _lines(folder / "manifests" / f"{split}.jsonl", (_entry(item, split) for item in items))
    _lines(folder / "dropped.jsonl", ({"key": key, "reason": why} for key, why in mixture.dropped.items()))


def _entry(item: Conversation, split: str) -> dict[str, Any]:
    hashes = [picture_hash(image) for image in item.images]
    return {"source": item.source, "key": item.key, "images": hashes, "split": split}


def _read(name: str, folder: Path, split: str) -> BenchmarkConversations:
    return BenchmarkConversations(name, folder, split, options=False, categories=False)


def _name(image: ImageSource) -> str:
    """The official name of a picture; empty if it has none."""
    stem = Path(str(image)).stem if isinstance(image, Path | str) and not str(image).startswith("data:") else ""
    return stem if len(stem) >= _SHORTEST_NAME else ""


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, builds and writes."""
    parser = argparse.ArgumentParser(prog="python -m datamodules.mixture", description=__doc__)
    parser.add_argument("--llava", type=Path, required=True, help="llava_v1_5_mix665k.json")
    parser.add_argument("--llava-images", type=Path, help="folder of coco/, gqa/, ...; the file's own if left out")
    parser.add_argument("--benchmark", action="append", default=[], metavar="NAME=FOLDER", help="once per benchmark")
    parser.add_argument("--out", type=Path, required=True, help="folder that is written")
    parser.add_argument("--llava-count", type=int, default=LLAVA, help="conversations drawn of LLaVA")
    parser.add_argument("--train-count", type=int, default=TRAIN, help="samples of a benchmark to train")
    parser.add_argument("--evaluation-count", type=int, default=EVALUATION, help="and at most to evaluate")
    given = parser.parse_args(arguments)
    pairs = [pair.partition("=") for pair in given.benchmark]
    if wrong := [name for name, _, path in pairs if not path]:
        parser.error(f"--benchmark {wrong[0]}: write <name>=<folder>")
    sizes = (given.llava_count, given.train_count, given.evaluation_count)
    try:
        llava = JsonlConversations(given.llava.absolute(), given.llava_images and given.llava_images.absolute())
        mixture = build(llava, {name: Path(path).absolute() for name, _, path in pairs}, sizes)
        write(mixture, given.out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    own = len(mixture.train) - mixture.llava
    print(f"{mixture.llava} of LLaVA and {own} of benchmarks to train, {len(mixture.dropped)} dropped")
    for name, items in mixture.evaluation.items():
        print(f"{len(items)} of {name} to evaluate")


if __name__ == "__main__":
    main()
