"""How speed is measured."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.evaluation.bootstrap import RESAMPLES


@dataclass(frozen=True)
class SpeedConfig:
    """How speed is measured.

    Attributes:
        max_new_tokens: cap of an answer, the first token included.
        prompts_per_epoch: conversations measured after an epoch, over all ranks, evenly drawn from the sources.
        prompts: conversations of the final evaluation; None takes all.
        warmup_prompts: conversations per rank that are answered before anything is measured.
        warmup_tokens: cap of a warm-up answer.
        transformers_prompts: conversations per rank that transformers' ``generate`` answers too.
        resamples: of the bootstrap behind the confidence intervals; 0 makes none.
        trajectories: prompts whose answers are decoded once more, behind the measurement, and kept round by round.
        batch_size: requests decoded at once; only 1, as the papers measure.
    """

    max_new_tokens: int = 200
    prompts_per_epoch: int = 24
    prompts: int | None = None
    warmup_prompts: int = 2
    warmup_tokens: int = 32
    transformers_prompts: int = 8
    resamples: int = RESAMPLES
    trajectories: int = 3
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prompts_per_epoch", "prompts", "warmup_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("warmup_prompts", "transformers_prompts", "resamples", "trajectories"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.batch_size != 1:
            raise ValueError(f"batch_size is {self.batch_size}; one request is decoded at a time: leave it at 1")
