"""Methods that draft without weights, by name, as configs call them: nothing is trained, and there is no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fovea.decoding.proposer import Proposer
from fovea.drafters.jacobi_lookahead import JacobiConfig, JacobiLookahead
from fovea.drafters.pld import PLDConfig, PLDProposer
from fovea.drafters.trie_lookahead import TrieConfig, TrieLookahead
from fovea.targets.base import TargetSpec


@dataclass(frozen=True)
class LookaheadConfig:
    """Which of the two methods called lookahead: ``trie`` (Zhao et al.) or ``jacobi`` (Fu et al.), and its numbers."""

    variant: Literal["trie", "jacobi"] = "trie"
    trie: TrieConfig = field(default_factory=TrieConfig)
    jacobi: JacobiConfig = field(default_factory=JacobiConfig)


#: Name -> the dataclass of its numbers.
CONFIGS: dict[str, type] = {"pld": PLDConfig, "lookahead": LookaheadConfig}

_PROPOSERS: dict[type, Any] = {PLDConfig: PLDProposer, TrieConfig: TrieLookahead, JacobiConfig: JacobiLookahead}


def register_proposer(name: str, config_type: type, proposer: Callable[[TargetSpec, Any], Proposer]) -> None:
    """Makes a method without weights known as ``name``.

    Args:
        name: as configs call it.
        config_type: a dataclass of its numbers, whose ``most_tokens_per_round`` bounds tau in a report.
        proposer: makes a :class:`fovea.decoding.proposer.Proposer` of the target's spec and those numbers.

    Raises:
        ValueError: another method has that name.
    """
    if CONFIGS.get(name, config_type).__qualname__ != config_type.__qualname__:
        raise ValueError(f"a method called {name!r} exists already; give this one another name")
    CONFIGS[name] = config_type
    _PROPOSERS[config_type] = proposer


class TrainingFree:
    """A method without weights and its numbers; what takes the place of a trained drafter in an evaluation.

    Args:
        name: one of :data:`CONFIGS`.
        config: its dataclass.
    """

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.config = config
        self._used = getattr(config, config.variant) if isinstance(config, LookaheadConfig) else config

    def proposer(self, spec: TargetSpec) -> Proposer:
        """A proposer for the target that ``spec`` describes."""
        return _PROPOSERS[type(self._used)](spec, self._used)

    def settings(self) -> dict[str, Any]:
        """What a report says about it."""
        variant = {"variant": self.config.variant} if isinstance(self.config, LookaheadConfig) else {}
        return {
            "drafter_parameters": 0,
            "most_tokens_per_round": self._used.most_tokens_per_round,
            "drafting": variant | asdict(self._used),
        }
