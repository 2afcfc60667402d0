"""The numbers of a small target that the project trains itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TinyConfig:
    """Architecture, recipe and acceptance of a small target; all of it is part of its cache key.

    The defaults are those of the embedded default target. Stages are counted in optimizer steps, never in seconds, so
    that a slow machine builds the same target.
    """

    #: Of which kind the target is; decides what it is trained on, too.
    architecture: Literal["qwen25vl", "llava_next", "llava15"] = "qwen25vl"
    seed: int = 0
    #: Most entries of the vocabulary; the pictures' words fill about as many.
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 16
    num_heads: int = 3
    num_kv_heads: int = 1
    #: Rotary frequencies (half the head width) for time, height and width; with one axis only their sum counts.
    mrope_section: tuple[int, ...] = (8, 12, 12)
    #: Far lower than the real model's 1e6, so that a step of one row or column turns the height and width frequencies
    #: enough to matter: a wrong position must show.
    rope_theta: float = 10.0
    max_positions: int = 4096
    vision_depth: int = 3
    vision_hidden_size: int = 128
    vision_intermediate_size: int = 256
    vision_heads: int = 4
    #: Most visual tokens of a picture of a Qwen2.5-VL; larger photographs are scaled down.
    max_visual_tokens: int = 100
    #: Steps in which the vision tower alone learns to name cells.
    alphabet_steps: int = 180
    #: Text layers of the model that learns to answer first, and its steps: on strings alone, on small pictures, on all.
    shallow_layers: int = 4
    reading_steps: int = 130
    small_steps: int = 200
    mixed_steps: int = 160
    #: Steps of the full model, grown from the shallow one.
    deep_steps: int = 60
    #: Peak learning rates: Muon's for matrices while the tower learns its alphabet and while the model learns to read
    #: (half of it later, a quarter at the end), and AdamW's for everything else.
    alphabet_lr: float = 4e-3
    matrix_lr: float = 2e-2
    other_lr: float = 2e-3
    #: Held-out questions of each family that the target is judged by.
    judged_questions: int = 40
    #: Least share of exact answers that the right picture must add over a wrong one, mean over families.
    min_gain: float = 0.15

    def __post_init__(self) -> None:
        object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
        if self.layers % self.shallow_layers:
            raise ValueError(f"layers={self.layers} must be a multiple of shallow_layers={self.shallow_layers}")
        if self.hidden_size != self.num_heads * 2 * sum(self.mrope_section):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} times the head width, "
                f"{2 * sum(self.mrope_section)} for mrope_section={self.mrope_section}"
            )
        for name in ("alphabet_steps", "reading_steps", "small_steps", "mixed_steps", "deep_steps", "judged_questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def build(self, cache: Path) -> Path:
        """The checkpoint folder; see :func:`fovea.targets.tiny.builder.build`."""
        from fovea.targets.tiny.builder import build

        return build(self, cache)
