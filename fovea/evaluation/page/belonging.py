"""Which row of a paper's table an evaluation belongs to; names are mapped here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fovea.evaluation.page.entries import Entry

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

#: What makes a FOVEA a variant of it, by the papers' names: a setting and its value.
VARIANTS: dict[str, tuple[str, Any]] = {
    "without_visual_correction": ("drafter.max_correction_depth", -1),
    "without_depth_embedding": ("drafter.use_depth_embedding", False),
    "without_correction_gate": ("drafter.use_gate", False),
    "without_hidden_loss": ("objective.lambda_hid", 0),
    "without_kl_loss": ("objective.lambda_kl", 0),
    "without_boundary_margin": ("objective.beta_cmp", 0),
    "fixed_prefix": ("drafter.interface", "fixed_prefix"),
    "dynamic_insertion": ("drafter.interface", "dynamic_insertion"),
    "correction_rebuild": ("drafter.interface", "correction_rebuild"),
    "random_top16": ("drafter.retrieval.mode", "random"),
    "static_image_top16": ("drafter.retrieval.mode", "static_image"),
    "query_agnostic_top16": ("drafter.retrieval.mode", "query_agnostic"),
    "state_only_top16": ("drafter.retrieval.mode", "state_only"),
    "dense": ("drafter.retrieval.mode", "dense"),
    "depth 0": ("drafter.max_correction_depth", 0),
    "depth 2": ("drafter.max_correction_depth", 2),
    "depth 3": ("drafter.max_correction_depth", 3),
    "other retrieval": ("drafter.retrieval.mode", "topk"),
    "one retrieval per block": ("drafter.retrieval.mode", "once_per_block"),
}
#: FOVEA as the paper has it.
FULL = "full"


def variant_of(entry: Entry) -> str | None:
    """Which variant of FOVEA an entry measured, by its settings: :data:`FULL`, a name, or None for several at once.

    Also None for another method.
    """
    if entry.method != METHODS["FOVEA"]:
        return None
    held = [name for name, (setting, value) in VARIANTS.items() if _at(entry.config, setting) == value]
    return FULL if not held else held[0] if len(held) == 1 else None


def of_method(entries: Sequence[Entry], published: str) -> list[Entry]:
    """The entries that belong to the row of a method; of FOVEA those without any change."""
    name = METHODS.get(published)
    own = [entry for entry in entries if entry.method == name]
    return [entry for entry in own if variant_of(entry) == FULL] if name == METHODS["FOVEA"] else own


def of_variant(entries: Sequence[Entry], name: str) -> list[Entry]:
    """The entries that measured a variant of FOVEA, by the papers' names or :data:`FULL`."""
    return [entry for entry in entries if variant_of(entry) == name]


def whole_beside(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The one unchanged FOVEA of the same sweep, or the only one there is."""
    whole = of_variant(entries, FULL)
    beside = [one for one in whole if one.job.parent == entry.job.parent] or whole
    return beside[0] if len(beside) == 1 else None


def _at(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
