"""Evaluations that answer one question together: what was changed, how much that matters, and what a paper says of it.

An evaluation that is part of a study is told from the others by its own settings, never by the name of its folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fovea.evaluation.page.belonging import BRANCHES as SETTINGS
from fovea.evaluation.page.belonging import (
    DECODED,
    FULL,
    TRAINED,
    VARIANTS,
    branch_of,
    siblings,
    study_of,
    temperature_of,
    tree_of,
    variant_of,
    whole_beside,
)
from fovea.evaluation.page.entries import Entry, labelled

TREES, SAMPLED, BUDGETS, EPOCHS, BRANCHES = "trees", "sampled", "budgets", "epochs", "branches"
#: Titles and first sentences, in the order of the page.
ABOUT = {
    TRAINED: (
        "Ablations",
        "FOVEA trained without one of its parts, or with another in its place, beside FOVEA itself.",
    ),
    "interfaces": (
        "Interfaces to the drafter's cache",
        "One trained drafter, decoding with each way of showing it what was retrieved.",
    ),
    "controls": (
        "Retrieval controls",
        "One trained drafter, decoding with other rules for which visual tokens a node sees.",
    ),
    "depths": (
        "Correction depth",
        "One trained drafter, its nodes corrected down to a depth; the root's children have depth 0, and -1 is none.",
    ),
    TREES: (
        "Shape of the draft tree",
        "What a larger tree brings, and what it costs: width x depth, and its nodes, the root counted.",
    ),
    SAMPLED: ("Sampled answers", "The same drafters where tokens are drawn and not chosen."),
    BUDGETS: (
        "Visual budgets and focus",
        "How many of the visual tokens a decoding state needs, and how the focus moves along the answer.",
    ),
    BRANCHES: (
        "Branches of the compressor",
        "SpecVLM with one branch alone in the place of its gate, trained so, from little compression to much.",
    ),
    EPOCHS: ("Epoch by epoch", "Measured after each epoch of training."),
}


@dataclass(frozen=True)
class Study:
    """Evaluations that belong together.

    Attributes:
        name, title, words: its place on the page, its heading, and what was changed.
        rows: what an evaluation is called here, and the evaluation; unchanged ones first.
        wholes: of each row the unchanged evaluation beside it, None if there is none, or several.
    """

    name: str
    title: str
    words: str
    rows: list[tuple[str, Entry]]
    wholes: list[Entry | None]

    @property
    def entries(self) -> list[Entry]:
        """The evaluations."""
        return [entry for _, entry in self.rows]


def find_studies(entries: Sequence[Entry]) -> list[Study]:
    """The studies that there are evaluations for."""
    found = []
    for name, (title, words) in ABOUT.items():
        rows = _rows(name, entries)
        if rows:
            compared = name in (TRAINED, *DECODED.values())
            wholes = [_whole(one, entries) if compared else None for _, one in rows]
            found.append(Study(name, title, words, rows, wholes))
    return found


def compared(entries: Sequence[Entry]) -> list[Entry]:
    """The evaluations that the first table compares: those that are part of no study, or all if every one is.

    An unchanged method that was measured again for a study is left to it, if it is there without one too.
    """
    members = {name: {id(entry) for _, entry in _rows(name, entries)} for name in ABOUT}
    studied = set().union(*members.values())
    changed = (
        members[TREES]
        | members[SAMPLED]
        | members[BRANCHES]
        | {id(entry) for entry in entries if study_of(entry) is not None}
    )
    alone = {entry.method for entry in entries if id(entry) not in studied}
    if not alone:
        return list(entries)
    return [
        entry
        for entry in entries
        if id(entry) not in studied or (id(entry) not in changed and entry.method not in alone)
    ]


def _rows(name: str, entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    if name == BUDGETS:
        return _by_label([entry for entry in entries if entry.budgets is not None])
    if name == EPOCHS:
        return _by_label([entry for entry in entries if entry.history.evaluations])
    if name == SAMPLED:
        greedy = any(temperature_of(entry) == 0 for entry in entries)
        drawn = [entry for entry in entries if temperature_of(entry) > 0]
        return [(f"{one.method}, temperature {temperature_of(one):g}", one) for one in drawn] if greedy else []
    greedy = [entry for entry in entries if temperature_of(entry) == 0]
    if name == TREES:
        shaped = [entry for entry in greedy if _is_shaped(entry, greedy)]
        shaped.sort(key=lambda entry: (entry.method, tree_of(entry) or ()))
        return [(_shape(entry), entry) for entry in shaped]
    if name == BRANCHES:
        alone = [(branch, entry) for entry in greedy if (branch := branch_of(entry)) is not None]
        alone.sort(key=lambda item: (list(SETTINGS).index(item[0][0]), item[0][1]))
        return list(_distinct([(branch_name(*branch), entry) for branch, entry in alone]))
    changed = [entry for entry in greedy if study_of(entry) == name]
    whole = [entry for entry in greedy if variant_of(entry) == FULL and not _is_shaped(entry, greedy)]
    beside = [entry for entry in whole if any(one in siblings(entry, greedy) for one in changed)]
    order = list(VARIANTS)
    changed.sort(key=lambda entry: (order.index(str(variant_of(entry))), str(entry.config.get("seed"))))
    named = [(_called(name, entry), entry) for entry in (*beside, *changed)]
    if name == "depths":
        named.sort(key=lambda row: int(row[0].removeprefix("depth ")))
    return list(_distinct(named))


def branch_name(branch: str, ratio: int) -> str:
    """What a branch with its ratio, or with its queries, is called."""
    if branch == "resampler":
        return f"{branch}, {ratio} {'query' if ratio == 1 else 'queries'}"
    return f"{branch}, {ratio}x"


def _by_label(entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    return [(short.label, entry) for short, entry in zip(labelled(entries), entries, strict=True)]


def _is_shaped(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether its sweep measures it with several trees and nothing else about it changed."""
    if tree_of(entry) is None or study_of(entry) is not None:
        return False
    own = [one for one in siblings(entry, entries) if one.method == entry.method and study_of(one) is None]
    return len({tree_of(one) for one in own}) > 1 and len(own) == len({tree_of(one) for one in own})


def _called(study: str, entry: Entry) -> str:
    """The name of a row."""
    drafter = entry.config.get("drafter", {})
    if study == "depths":
        return f"depth {drafter.get('max_correction_depth')}"
    name = variant_of(entry)
    if name == FULL:
        return "FOVEA"
    words = str(name).replace("_top16", "").replace("_", " ")
    rule = drafter.get("retrieval", {})
    if study != "interfaces" and str(name) in (*_COUNTED, "topk") and "k" in rule:
        as_many = rule.get("cardinality") == "mass" and name != "topk"
        words += ", as many as the rule gives" if as_many else f", K = {rule['k']}"
    return words


#: Controls that take so many entries; the paper names them with their number.
_COUNTED = ("random_top16", "static_image_top16", "query_agnostic_top16", "state_only_top16")


def _shape(entry: Entry) -> str:
    width, depth, nodes = tree_of(entry) or (0, 0, 0)
    return f"{entry.method}, {width} x {depth}, {nodes} nodes"


def _whole(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    whole = whole_beside(entry, [one for one in entries if temperature_of(one) == 0])
    return None if whole is entry else whole


def _distinct(rows: Sequence[tuple[str, Entry]]) -> Iterable[tuple[str, Entry]]:
    """Rows of one name are told apart by their seeds, or else by the labels of their entries."""
    for name, entry in rows:
        same = [one for other, one in rows if other == name]
        seeds = {one.config.get("seed") for one in same}
        more = f", seed {entry.config.get('seed')}" if len(seeds) == len(same) else f" ({entry.label})"
        yield (name + more if len(same) > 1 else name), entry
