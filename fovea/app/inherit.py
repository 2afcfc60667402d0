"""Settings of an earlier run, taken over by a resumed run or by an evaluation of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass(frozen=True)
class CommandLine:
    """What the user typed, apart from what the files say.

    Attributes:
        overrides: as typed.
        groups: groups for which an option was chosen, such as ``decode``.
        values: dotted field -> value.
    """

    overrides: list[str] = field(default_factory=list)
    groups: frozenset[str] = frozenset()
    values: dict[str, Any] = field(default_factory=dict)

    def below(self, group: str) -> dict[str, Any]:
        """The values typed for ``group``, nested: ``drafter.retrieval.rho=.6`` gives {"retrieval": {"rho": .6}}."""
        nested = OmegaConf.create()
        for key, value in self.values.items():
            if key.startswith(f"{group}."):
                OmegaConf.update(nested, key.removeprefix(f"{group}."), value, force_add=True)
        return OmegaConf.to_container(nested)  # type: ignore[return-value]


def command_line() -> CommandLine:
    """The command line of the running job."""
    hydra = HydraConfig.get()
    return parse(list(hydra.overrides.task), [str(c) for c in hydra.runtime.choices])


def parse(overrides: list[str], groups: Iterable[str]) -> CommandLine:
    """Splits ``overrides`` into choices of ``groups`` and values of fields."""
    chosen, values = set(), {}
    known = set(groups)
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.key_or_group in known:
            chosen.add(override.key_or_group)
        elif not override.is_delete():
            values[override.key_or_group] = override.value()
    return CommandLine(overrides, frozenset(chosen), values)


def inherit(cfg: DictConfig, saved: DictConfig, typed: CommandLine, nodes: Iterable[str]) -> DictConfig:
    """``cfg`` with ``nodes`` as the run with the configuration ``saved`` had them; what was typed still wins."""
    merged = cfg.copy()
    with open_dict(merged):
        for node in nodes:
            if node not in typed.groups and node in saved:
                merged[node] = saved[node]
        merged.paths.cache = saved.paths.cache  # where that run's target is
    for key, value in typed.values.items():
        # Hydra has checked the key; the earlier run may be older than it.
        OmegaConf.update(merged, key, value, force_add=True)
    return merged
