"""What sets a FOVEA apart from the one that the paper has: every setting of drafter and objective that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fovea.drafters.fovea import FoveaConfig
from fovea.training.objective import ObjectiveConfig

#: Settings that make no other drafter: rows in memory at once, seeds of a control's draws.
_OF_NO_EFFECT = frozenset(("objective.chunk_rows", "drafter.retrieval.seed"))
#: Which settings of the retrieval a rule does not read.
_RETRIEVAL = "drafter.retrieval."
#: Most settings in a row that refer to the next one.
_FOLLOWED = 8
_OF_THE_MASS, _OF_A_NUMBER = ("rho", "k_min", "k_max"), ("k", "cardinality")


def changes(config: Mapping[str, Any], typed: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a job that are not those of the paper's FOVEA, by dotted name.

    The paper's are the defaults of the configuration classes. What a target's own settings say in their place, such as
    a smaller scale of retrieval for smaller pictures, is no change, unless it was typed for the job.

    Args:
        config: of the job, as nested plain types, with interpolations as they were written; parts may be missing.
        typed: what was typed for it, by name.
    """
    paper = dict(_leaves({"drafter": asdict(FoveaConfig()), "objective": asdict(ObjectiveConfig())}))
    # The draft tree sets the depth, and is no part of the drafter.
    ignored = _OF_NO_EFFECT | {"drafter.depth"} | _unread(config)
    own = dict(_leaves({name: config.get(name) for name in ("drafter", "objective")}))
    found = {}
    for name in own.keys() & paper.keys() - ignored:
        source, value = _followed(own[name], config)
        # A value typed for the drafter may be the one that the target's settings have under the same name.
        scale = source or name.replace("drafter.", "model.", 1)
        of_target = scale.startswith("model.") and scale not in typed and value == at(config, scale)
        if not of_target and value != paper[name]:
            found[name] = value
    return found


def at(config: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted ``name``; None if it is not there."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _unread(config: Mapping[str, Any]) -> set[str]:
    """Settings of the retrieval that its rule does not read."""
    rule = at(config, "drafter.retrieval") or {}
    mode = rule.get("mode", "mass")
    by_mass = mode == "mass" or (mode not in ("topk", "dense") and rule.get("cardinality") == "mass")
    names = (() if by_mass else _OF_THE_MASS) + (_OF_A_NUMBER if mode in ("mass", "dense") else ())
    return {_RETRIEVAL + name for name in names}


def _followed(value: Any, config: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and value of what a setting refers to; an empty name and the value itself if it refers to nothing."""
    source = ""
    for _ in range(_FOLLOWED):
        if not (isinstance(value, str) and value.startswith("${") and value.endswith("}")):
            break
        source = value[2:-1]
        value = at(config, source)
    return source, value


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}{name}.")
    elif prefix:
        yield prefix[:-1], node
