"""Where an evaluation was measured, on which benchmark and which target, and what the papers call the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fovea.evaluation.page.entries import Entry
from fovea.evaluation.results import ALL

#: Our names of benchmarks -> what the papers' columns call them.
BENCHMARKS = {
    "chartqa": ("ChartQA",),
    "llava_bench": ("LLaVA-Wild",),
    "mathvista": ("MathVista",),
    "mmbench": ("MMBench",),
    "mme": ("MME",),
    "mmspec": ("MMSpec",),
    "mmt_bench": ("MMT", "MMT-Bench"),
    "ocrbench": ("OCRBench",),
    "scienceqa": ("ScienceQA",),
    "seed_bench": ("SEED-Bench",),
    "seed_bench_2": ("SEED",),
    "textvqa": ("TextVQA",),
    "vqav2": ("VQAv2",),
}
#: Checkpoints by the last part of their name -> what the papers call them.
TARGETS = {
    "llava-1.5-7b-hf": ("LVA1.5-7B", "LLaVA-1.5-7B"),
    "llava-1.5-13b-hf": ("LVA1.5-13B", "LLaVA-1.5-13B"),
    "llava-v1.6-vicuna-7b-hf": ("LLaVA-Next-7B", "LVA1.6-7B", "LLaVA-1.6-7B"),
    "llava-v1.6-vicuna-13b-hf": ("LLaVA-Next-13B", "LVA1.6-13B", "LLaVA-1.6-13B"),
    "open-llava-next-vicuna-7b": ("OLVA1.6-7B", "Open-LLaVA-1.6-7B"),
    "Qwen2.5-VL-7B-Instruct": ("Qwen2.5-VL-7B",),
}


@dataclass(frozen=True)
class Place:
    """A benchmark, or one question family of it, and a target.

    Attributes:
        benchmark, target: our names; an empty benchmark was not recorded.
        family: of questions; all are pooled by default.
        column: the paper's column of it; empty if the paper has none.
    """

    benchmark: str
    target: str
    family: str = ALL
    column: str = ""

    @property
    def label(self) -> str:
        """Its name in a heading."""
        return ", ".join(filter(None, (self.column or self.benchmark, self.target)))


def is_of(entry: Entry, target: str | None) -> bool:
    """Whether figures of ``entry`` may stand in a row about a paper's ``target``, under a heading that names their own.

    What was measured on a target of the papers belongs to its own rows alone; None is a row about no target.
    """
    known = TARGETS.get(entry.target.rpartition("/")[2], ())
    return target is None or not known or target in known


def places_of(entries: Iterable[Entry], columns: Sequence[str]) -> list[Place]:
    """Where ``entries`` were measured: first what no column of the paper is about, then in the order of its columns."""
    found: dict[Place, None] = {}
    for entry in entries:
        name = next((column for column in columns if column in BENCHMARKS.get(entry.benchmark, ())), "")
        families = [(f"{entry.benchmark}/{column}", column) for column in columns]
        own = [place for place in families if place[0] in entry.figures] if entry.benchmark else []
        for family, column in own or [(ALL, name)]:
            found[Place(entry.benchmark, entry.target, family, column)] = None
    return sorted(found, key=lambda place: columns.index(place.column) if place.column else -1)


def measured_at(entries: Iterable[Entry], place: Place) -> list[Entry]:
    """Those of ``entries`` that were measured there."""
    return [one for one in entries if (one.benchmark, one.target) == (place.benchmark, place.target)]
