"""What all drafters can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fovea.targets.base import TargetSpec

DraftRope = Literal["target", "1d"]


@dataclass(frozen=True)
class DrafterConfig:
    """What all drafters can be told.

    Attributes:
        num_blocks: decoder blocks of the target's kind.
        depth: D, deepest tree depth that is expanded; training unrolls up to D + 1 steps.
        rope: ``target`` for the target's rotary positions, ``1d`` for plain indices of the drafter's own rows.
        feature_noise: size of the noise on the target's states while training (EAGLE has 0.2), see :func:`disturb`.
        draft_vocabulary: tokens that can be drafted, the most frequent ones of the training answers; None for all.
            A small one makes the head cheap, at the price of rounds that end where another token comes (EAGLE-3).
    """

    num_blocks: int = 1
    depth: int = 6
    rope: DraftRope = "target"
    feature_noise: float = 0.0
    draft_vocabulary: int | None = None

    def __post_init__(self) -> None:
        self._require_positive("num_blocks", "depth")
        self._require_choice(rope=DraftRope)
        if not self.feature_noise >= 0:
            raise ValueError(f"drafter.feature_noise is {self.feature_noise}; it must be 0 or more")
        if self.draft_vocabulary is not None:
            self._require_positive("draft_vocabulary")

    def layers_read(self, spec: TargetSpec) -> tuple[int, ...]:
        """Feature layers of the target that the drafter reads in the place of f; most read f."""
        del spec
        return ()

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"drafter.{name} is {getattr(self, name)}; it must be 1 or more")

    def _require_choice(self, **choices: Any) -> None:
        for name, literal in choices.items():
            if getattr(self, name) not in get_args(literal):
                raise ValueError(f"drafter.{name} is {getattr(self, name)!r}; choose from {get_args(literal)}")
