"""The sizes of a target, by which its memory and that of its drafters can be told before its weights are at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.load import read_config
from fovea.targets.remote_code import remote_code_refused


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder stack, its embedding, its LM head, and what stands before it.

    Attributes:
        rotary_axes: numbers in a rotary position; 3 for M-RoPE.
        qkv_bias: queries, keys and values have biases.
        tied: embedding and LM head are one matrix.
        vision_parameters: parameters of vision tower and projector; 0 for text.
        max_positions: tokens of its context.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rotary_axes: int = 1
    qkv_bias: bool = False
    tied: bool = False
    vision_parameters: int = 0
    max_positions: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("vision_parameters", "qkv_bias", "tied") else 1
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def head_parameters(self) -> int:
        """Parameters of embedding, LM head and final norm: what offline training needs of the target."""
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: two norms, attention, SwiGLU."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (query + kv) + self.qkv_bias * (query + 2 * kv)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole target."""
        return self.head_parameters + self.num_layers * self.layer_parameters + self.vision_parameters

    @property
    def cache_numbers(self) -> int:
        """Keys and values per token of the target's cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def spec(self, name: str = "planned") -> TargetSpec:
        """What a drafter's parameters are built from; what does not change their number is left at a usual value."""
        half = self.head_dim // 2
        section = (half - 2 * (half // 3), half // 3, half // 3) if self.rotary_axes == 3 else None
        return TargetSpec(
            architecture=name,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=1e-6,
            qkv_bias=self.qkv_bias,
            rope=RopeSpec(10_000.0, section),
            max_positions=self.max_positions,
            eos_ids=(0,),
        )

    def differences(self, other: Architecture) -> dict[str, tuple[Any, Any]]:
        """Values here and in ``other`` of the sizes that are not the same."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def read_architecture(folder: Path | str) -> Architecture:
    """The sizes of the checkpoint in ``folder``, from its configuration files; its weights need not be there.

    Raises:
        CheckpointError: no config.json in the folder.
        UnsupportedTargetError: as for :func:`fovea.targets.load.load_spec`.
    """
    config, adapter = read_config(Path(folder))
    spec = adapter.read_spec(config, (0,))
    tied = bool(config.tie_word_embeddings)
    with torch.device("meta"), remote_code_refused(Path(folder)):
        if hasattr(adapter.model_class, "from_config"):  # one of transformers' Auto classes
            model = adapter.model_class.from_config(config, trust_remote_code=False)
        else:
            model = adapter.model_class._from_config(config)
    everything = sum(weight.numel() for weight in model.parameters())
    decoder = sum(weight.numel() for weight in model.get_decoder().parameters())
    head = 0 if tied else spec.vocab_size * spec.hidden_size
    return Architecture(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rotary_axes=spec.rope.axes,
        qkv_bias=spec.qkv_bias,
        tied=tied,
        vision_parameters=everything - decoder - head,
        max_positions=spec.max_positions,
    )
