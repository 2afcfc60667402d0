"""What an evaluation is: a method, or FOVEA with something changed; the papers' names are mapped here, nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.preset import at, changes
from fovea.evaluation.results import CONTINUED, CONTINUED_FROM

#: The papers' names of methods -> ours.
METHODS = {
    "Lookahead": "lookahead",
    "PLD": "pld",
    "EAGLE-3": "eagle3",
    "Dream": "dream",
    "Vispec": "vispec",
    "MSD": "msd",
    "FOVEA": "fovea",
    "EagleVLM": "eaglevlm",
    "SpecVLM": "specvlm",
    "weight": "specvlm_weight",
    "concat": "specvlm_concat",
    "select": "specvlm",
}

#: Branches of SpecVLM's compressor that stand alone -> the setting that says how much they leave.
BRANCHES = {"prune": "prune_ratio", "pool": "pool_ratio", "conv": "conv_ratio", "resampler": "queries"}

_DEPTH, _INTERFACE, _MODE = "drafter.max_correction_depth", "drafter.interface", "drafter.retrieval.mode"
#: What makes a FOVEA a variant of it, by the papers' names where they have one: a setting and its value.
VARIANTS: dict[str, tuple[str, Any]] = {
    "without_visual_correction": (_DEPTH, -1),
    "without_depth_embedding": ("drafter.use_depth_embedding", False),
    "without_correction_gate": ("drafter.use_gate", False),
    "without_hidden_loss": ("objective.lambda_hid", 0),
    "without_kl_loss": ("objective.lambda_kl", 0),
    "without_boundary_margin": ("objective.beta_cmp", 0),
    "fixed_prefix": (_INTERFACE, "fixed_prefix"),
    "dynamic_insertion": (_INTERFACE, "dynamic_insertion"),
    "correction_rebuild": (_INTERFACE, "correction_rebuild"),
    "random_top16": (_MODE, "random"),
    "static_image_top16": (_MODE, "static_image"),
    "query_agnostic_top16": (_MODE, "query_agnostic"),
    "state_only_top16": (_MODE, "state_only"),
    "dense": (_MODE, "dense"),
    "topk": (_MODE, "topk"),
    "once_per_block": (_MODE, "once_per_block"),
    "depth 0": (_DEPTH, 0),
    "depth 2": (_DEPTH, 2),
    "depth 3": (_DEPTH, 3),
}
#: FOVEA as the paper has it.
FULL = "full"
#: Studies that change one setting of a trained drafter while it decodes.
DECODED = {_INTERFACE: "interfaces", _MODE: "controls", _DEPTH: "depths"}
#: The study of everything that was trained otherwise.
TRAINED = "ablations"


def variant_of(entry: Entry) -> str | None:
    """Which variant of FOVEA an entry measured, by its settings: :data:`FULL`, a name, or None for another change.

    None too for several changes at once, save that a rule of retrieval may have numbers of its own; and for another
    method.
    """
    if entry.method != METHODS["FOVEA"]:
        return None
    changed = changes(entry.config, entry.fields)
    if not changed:
        return FULL
    held = [name for name, (setting, value) in VARIANTS.items() if setting in changed and changed[setting] == value]
    return held[0] if len(held) == 1 and all(_details(held[0], other) for other in changed) else None


def _details(name: str, setting: str) -> bool:
    """Whether ``setting`` is what makes the variant ``name``, or says more about its rule of retrieval."""
    own = VARIANTS[name][0]
    return setting == own or (own == _MODE and setting.startswith("drafter.retrieval."))


def _is_the_papers(entry: Entry) -> bool:
    """Whether a variant has the paper's numbers: K = 16 of a control, for example."""
    return len(changes(entry.config, entry.fields)) <= 1


def is_decoded_so(entry: Entry) -> bool:
    """Whether what makes the entry a variant was set for its decoding alone, behind a training without it."""
    name = variant_of(entry)
    return name in VARIANTS and entry.config.get("task") == "evaluate" and VARIANTS[name][0] in entry.fields


def branch_of(entry: Entry) -> tuple[str, int] | None:
    """The branch of SpecVLM's compressor that an entry has alone, and its ratio or queries; None with a gate."""
    mode = at(entry.config, "drafter.compression.mode")
    if mode not in BRANCHES:
        return None
    ratio = at(entry.config, f"drafter.compression.{BRANCHES[mode]}")
    return (mode, ratio) if isinstance(ratio, int) else None


def study_of(entry: Entry) -> str | None:
    """The study that a variant of FOVEA belongs to; None for what is no variant."""
    name = variant_of(entry)
    if name is None or name == FULL:
        return None
    return DECODED.get(VARIANTS[name][0], TRAINED) if is_decoded_so(entry) else TRAINED


def temperature_of(entry: Entry) -> float:
    """At which its answers were drawn; 0 for greedy ones."""
    return entry.result.settings.get("selection", {}).get("temperature", 0.0)


def tree_of(entry: Entry) -> tuple[int, int, int] | None:
    """Width, depth and nodes of its draft tree; None for a proposer that grows another one."""
    tree = entry.result.settings.get("tree")
    return (tree["width"], tree["depth"], tree["nodes"]) if tree else None


def of_method(entries: Sequence[Entry], published: str) -> list[Entry]:
    """The entries that belong to the row of a method; of FOVEA those without any change, of SpecVLM with its gate."""
    name = METHODS.get(published)
    own = [entry for entry in entries if entry.method == name and branch_of(entry) is None]
    return [entry for entry in own if variant_of(entry) == FULL] if name == METHODS["FOVEA"] else own


def of_variant(entries: Sequence[Entry], name: str) -> list[Entry]:
    """The entries that measured a variant of FOVEA, by the papers' names or :data:`FULL`.

    Those that decode so if there are any, beside one checkpoint, as the papers compare interfaces and retrieval;
    otherwise those that were trained so, as the papers leave out components.
    """
    own = [entry for entry in entries if variant_of(entry) == name and _is_the_papers(entry)]
    if name != FULL and VARIANTS[name][0] in DECODED and name != "without_visual_correction":
        return [entry for entry in own if is_decoded_so(entry)] or own
    return [entry for entry in own if not is_decoded_so(entry)]


def siblings(entry: Entry, entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the same sweep, the entry itself included."""
    return [one for one in entries if one.job.parent == entry.job.parent]


def whole_beside(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The one unchanged FOVEA measured under the same conditions: of the same sweep and seed, or the only one."""
    whole = [one for one in of_variant(entries, FULL) if _same_conditions(entry, one)]
    beside = siblings(entry, whole) or whole
    beside = [one for one in beside if one.config.get("seed") == entry.config.get("seed")] or beside
    return beside[0] if len(beside) == 1 else None


#: Settings of a result that tell its drafter, or how it was counted, and not what it was measured on.
_NO_CONDITION = frozenset(
    ("drafter_parameters", "retrieval", "resamples", "benchmark_records", CONTINUED, CONTINUED_FROM)
)


def _same_conditions(one: Entry, other: Entry) -> bool:
    """Whether two entries may be subtracted: one target, one benchmark, and whatever else both have recorded alike.

    Drafters that differ in how they decode alone have the same weights.
    """
    first, second = one.result.settings, other.result.settings
    if any(first.get(name) != second.get(name) for name in ("target", "benchmark")):
        return False
    names = (first.keys() & second.keys()) - _NO_CONDITION
    if "target_weights" in names:
        names -= {"target_name", "target_revision"}  # of copies of one checkpoint
    if any(first[name] != second[name] for name in names):
        return False
    weights = [at(entry.provenance, "fingerprints.drafter.weights") for entry in (one, other)]
    return not is_decoded_so(one) or None in weights or weights[0] == weights[1]
