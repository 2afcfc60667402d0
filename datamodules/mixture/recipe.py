"""What is drawn from where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.benchmarks import BenchmarkConversations
from datamodules.conversations import MMSpecConversations, SourceError
from datamodules.mixture.decontamination import TEXT, Evaluated, Part, Refusal, look_alikes
from datamodules.mixture.prints import Prints
from fovea.targets.conversation import Conversation

#: Of every split and shuffle.
SEED = 42
#: Splits of a benchmark that are put together; alternatives in the order in which they are looked for.
Splits = tuple[tuple[str, ...], ...]
#: Of each benchmark that is split here; MathVista's testmini alone has but 1,000.
SPLIT_HERE: dict[str, Splits] = {
    "mmt_bench": (("ALL",), ("val", "test")),  # its TSV, its data set on the hub
    "seed_bench_2": (("test",),),
    "mathvista": (("testmini", "test"),),
    "ocrbench_v2": (("test",),),
}
#: Official training and evaluation splits of the others.
OFFICIAL: dict[str, tuple[Splits, Splits]] = dict.fromkeys(("scienceqa", "chartqa"), ((("train",),), (("test",),)))
#: The six that are trained on.
TRAINED = (*SPLIT_HERE, *OFFICIAL)
#: Read in a layout of its own.
MMSPEC = "mmspec"
#: Benchmarks that are only evaluated, by the splits that are; some have another name on the hub.
ONLY_EVALUATED: dict[str, Splits] = {
    "textvqa": (("val",), ("validation",)),
    "mme": (("test",),),
    "ocrbench": (("test",),),
    "mmbench": (("dev",),),
    "seed_bench": (("test",),),
    "vqav2": (("test-dev2015",), ("testdev",)),
    "mmmu": (("validation",),),
    "llava_bench": (("train",),),  # the hub calls it so; nobody trains on it
    MMSPEC: (),
}
#: Folders or configurations of a benchmark that has several.
SUBSETS = {"mmmu": ("Art", "Biology", "Chemistry", "Economics", "Math", "Physics")}
#: The split that is trained on; that of a benchmark to evaluate on is :func:`evaluation_split`.
TRAIN = "train"


@dataclass(frozen=True)
class Sizes:
    """Conversations of LLaVA before those without a picture are dropped, and samples of each benchmark.

    ``evaluation`` are at most, and of the benchmarks that are split here.
    """

    llava: int = 55_000
    train: int = 1_000
    evaluation: int = 3_000


@dataclass
class Mixture:
    """What was built.

    Attributes:
        train: LLaVA's part, then the benchmarks'.
        evaluation: a part per benchmark.
        look_alikes: see :func:`~datamodules.mixture.decontamination.look_alikes`.
    """

    train: list[Part] = field(default_factory=list)
    evaluation: list[Part] = field(default_factory=list)
    look_alikes: list[dict[str, Any]] = field(default_factory=list)
    prints: Prints = field(default_factory=Prints)

    @property
    def splits(self) -> dict[str, list[Conversation]]:
        """Conversations of each split."""
        trained = [item for part in self.train for item in part.kept]
        return {TRAIN: trained} | {part.split: part.kept for part in self.evaluation}

    @property
    def refused(self) -> list[Refusal]:
        """All that was left out."""
        return [refusal for part in (*self.train, *self.evaluation) for refusal in part.refused]


class _Benchmark(BenchmarkConversations):
    """A conversation whose picture is missing is refused by itself, and counted."""

    pictures_required = False


class _MMSpec(MMSpecConversations):
    """The same."""

    pictures_required = False


def check_names(names: Iterable[str]) -> None:
    """Whether all of ``names`` are benchmarks of the mixture.

    Raises:
        SourceError: one is not.
    """
    known = sorted([*TRAINED, *ONLY_EVALUATED])
    for name in names:
        if name not in known:
            raise SourceError(f"'{name}' has no place in the mixture; choose from: {', '.join(known)}")


def evaluation_split(name: str) -> str:
    """What the evaluation split of a benchmark is called."""
    return f"evaluation-{name}"


def train_test_split(count: int, train: int, test: int) -> tuple[list[int], list[int], list[int]]:
    """Indices of both parts, equal to those of scikit-learn's function of that name with ``random_state=42``.

    And of those that are in neither, as its order goes on.

    Raises:
        SourceError: there are no more than ``train``.
    """
    if count <= train:
        raise SourceError(f"{count} samples cannot give {train} to train and others to evaluate")
    order = np.random.RandomState(SEED).permutation(count).tolist()
    test = min(test, count - train)
    return order[test : test + train], order[:test], order[test + train :]


def build(llava: Sequence[Conversation], benchmarks: dict[str, str], sizes: Sizes | None = None) -> Mixture:
    """The mixture of LLaVA's conversations and of the benchmarks at hand, by name and folder.

    Args:
        llava: all of LLaVA-v1.5-mix665k.
        benchmarks: any of those above; a folder may be ``hf://datasets/<owner>/<name>``.
        sizes: of its parts; the paper's if None.

    Raises:
        SourceError: a benchmark cannot be read, is too small, or has no place in the mixture; or no picture of it is
            sound.
    """
    check_names(benchmarks)
    sizes = sizes or Sizes()
    mixture = Mixture()
    evaluated = Evaluated(mixture.prints)
    waiting = [_of_llava(llava, sizes.llava)]
    # All that is evaluated on must be known before anything is drawn to train.
    for name, folder in benchmarks.items():
        read, held, candidates = _drawn(name, folder, sizes)
        judged = Part(name, evaluation_split(name), read=read, wanted=len(held))
        evaluated.add(judged, held)
        if not judged.kept:
            raise SourceError(f"{name} in {folder}: no picture can be read, the first as {judged.refused[0].reason}")
        mixture.evaluation.append(judged)
        if candidates is not None:
            waiting.append((Part(name, TRAIN, read=read, wanted=sizes.train), candidates))
    for part, candidates in waiting:
        evaluated.fill(part, candidates)
        mixture.train.append(part)
    splits = mixture.splits
    mixture.look_alikes = list(look_alikes(splits.pop(TRAIN), splits, mixture.prints))
    return mixture


def _drawn(name: str, folder: str, sizes: Sizes) -> tuple[int, Sequence[Conversation], list[Conversation] | None]:
    """How many a benchmark has, those to evaluate, and those to train in the order of their turn, if any."""
    if name == MMSPEC:
        held = _MMSpec(folder)
        return len(held), held, None
    if name in ONLY_EVALUATED:
        held = _read(name, folder, ONLY_EVALUATED[name])
        return len(held), held, None
    if name in OFFICIAL:
        learned, held = (_read(name, folder, splits) for splits in OFFICIAL[name])
        order = np.random.RandomState(SEED).permutation(len(learned)).tolist()
        return len(learned) + len(held), held, [learned[index] for index in order]
    items = _read(name, folder, SPLIT_HERE[name])
    try:
        first, held, others = train_test_split(len(items), sizes.train, sizes.evaluation)
    except SourceError as error:
        raise SourceError(f"{name} in {folder}: {error}") from error
    return len(items), [items[index] for index in held], [items[index] for index in (*first, *others)]


def _of_llava(llava: Sequence[Conversation], count: int) -> tuple[Part, list[Conversation]]:
    """Its part, in which those of the first ``count`` without a picture are refused, and all others that have one."""
    order = np.random.default_rng(SEED).permutation(len(llava)).tolist()
    drawn = [llava[index] for index in order[:count]]
    part = Part("llava", TRAIN, read=len(llava), wanted=0)
    for item in drawn:
        if item.images:
            part.wanted += 1
        else:
            part.drawn += 1
            part.refuse(item, TEXT, "it has no picture")
    others = (llava[index] for index in order[count:])
    return part, [item for item in (*drawn, *others) if item.images]


def _read(name: str, folder: str, alternatives: Splits) -> list[Conversation]:
    """All of the first of the alternatives that is there.

    Raises:
        SourceError, FileNotFoundError: of the first, if none is.
    """
    subsets = () if Path(folder).is_file() else SUBSETS.get(name, ())  # a table in one file has all of them
    failed: Exception | None = None
    for splits in alternatives:
        try:
            sources = [_Benchmark(name, folder, split, subsets, options=False, categories=False) for split in splits]
            return [item for source in sources for item in source]
        except (SourceError, FileNotFoundError) as error:
            failed = failed or error
    assert failed is not None  # every benchmark has a split
    raise failed
