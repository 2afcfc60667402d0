"""Drafters by name, as configs and checkpoints call them."""

from __future__ import annotations

from fovea.drafters.base import Drafter
from fovea.drafters.config import DrafterConfig
from fovea.drafters.dream import DreamDrafter
from fovea.drafters.eagle3 import Eagle3Drafter
from fovea.drafters.eaglevlm import EagleVlmDrafter
from fovea.drafters.fovea import FoveaDrafter
from fovea.drafters.msd import MsdDrafter
from fovea.drafters.specvlm import SpecVlmDrafter
from fovea.drafters.training_free import CONFIGS
from fovea.drafters.vispec import ViSpecDrafter
from fovea.targets.base import TargetSpec
from fovea.targets.head import TargetHead

_KINDS: tuple[type[Drafter], ...] = (
    FoveaDrafter,
    EagleVlmDrafter,
    Eagle3Drafter,
    SpecVlmDrafter,
    MsdDrafter,
    DreamDrafter,
    ViSpecDrafter,
)
DRAFTERS: dict[str, type[Drafter]] = {kind.name: kind for kind in _KINDS}


def register_drafter(kind: type[Drafter]) -> type[Drafter]:
    """Makes ``kind`` known under its ``name``; a decorator for drafters that other packages bring.

    Raises:
        ValueError: another method has that name.
    """
    known = DRAFTERS.get(kind.name)
    another = known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__)
    if another or kind.name in CONFIGS:
        raise ValueError(f"a method called {kind.name!r} exists already; give {kind.__qualname__} another name")
    DRAFTERS[kind.name] = kind
    return kind


def drafter_type(name: str) -> type[Drafter]:
    """The drafter class called ``name``; its ``config_type`` is the dataclass of its numbers."""
    if name not in DRAFTERS:
        raise ValueError(f"no drafter is called {name!r}; choose from {sorted(DRAFTERS)}")
    return DRAFTERS[name]


def build_drafter(name: str, spec: TargetSpec, config: DrafterConfig, head: TargetHead) -> Drafter:
    """An untrained drafter for the target that ``spec`` describes and ``head`` belongs to."""
    return drafter_type(name)(spec, config, head)
