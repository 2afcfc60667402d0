"""What a plan counts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanConfig:
    """Assumptions of a plan.

    Attributes:
        accelerator: what the run will have; the machine that plans need not have it.
        device_memory_gib: memory of a device, in GiB; None takes that of this machine's GPU, or else 80.
        samples: samples to train on; None takes those of the data at hand, or else the paper's.
        tokens, visual_tokens, answer_tokens: of a typical sample.
        picture_bytes: encoded pictures of a typical sample, in bytes, where they are stored for visual tokens; None
            takes the mean of some at hand, or else that of COCO's photographs.
    """

    accelerator: Literal["gpu", "cpu"] = "gpu"
    device_memory_gib: float | None = None
    samples: int | None = None
    tokens: int = 716
    visual_tokens: int = 391
    answer_tokens: int = 225
    picture_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("device_memory_gib", "samples", "picture_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0, or null")
