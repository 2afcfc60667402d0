"""The numbers of the embedded default target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TinyConfig:
    """Architecture, recipe and acceptance of the embedded default target; hashed into the name of its folder."""

    seed: int = 0
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 16
    num_heads: int = 3
    num_kv_heads: int = 1
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    rope_theta: float = 100.0
    max_positions: int = 2048
    vision_depth: int = 3
    vision_hidden_size: int = 128
    vision_intermediate_size: int = 256
    vision_heads: int = 4
    shallow_layers: int = 4
