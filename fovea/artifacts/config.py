"""Settings of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fovea.artifacts.schema import STORED_DTYPES, STORED_VISUALS, StoredDtype, StoredVisual

WriterKind = Literal["auto", "process", "thread"]
WRITERS: tuple[str, ...] = get_args(WriterKind)


@dataclass(frozen=True)
class ExportConfig:
    """How artifacts are made.

    Attributes:
        mid_layers: layers that the mid state of a token is chosen from; outputs of layers 1..L.
        feature_layers: layers whose outputs are stored beside, for drafters that read them.
        dtype: stored dtype of the states: bf16, fp32, or fp8 with a scale per row.
        visual: "stored" keeps the projected visual tokens; "recomputed" keeps the pictures, of which the target's
            vision tower makes them again when training reads a batch.
        answers: "target" lets the target answer every user turn, "dataset" takes the answers that are there.
        max_new_tokens: cap of the target's answers, in tokens.
        max_tokens: longer conversations are left out; None takes all.
        batch_size: conversations per forward pass.
        shard_bytes: size at which a shard is closed.
        strict: a broken picture or unreadable conversation ends the export instead of being counted.
        writer: what encodes, hashes and writes: a "process", a "thread" of the exporting one, or "auto". Changes no
            byte of the artifacts.
    """

    mid_layers: tuple[int, ...]
    feature_layers: tuple[int, ...] = ()
    dtype: StoredDtype = "bf16"
    visual: StoredVisual = "stored"
    answers: Literal["target", "dataset"] = "target"
    max_new_tokens: int = 500
    max_tokens: int | None = 5120
    batch_size: int = 4
    shard_bytes: int = 1_000_000_000
    strict: bool = False
    writer: WriterKind = "auto"

    def __post_init__(self) -> None:
        if not self.mid_layers or len(set(self.mid_layers)) != len(self.mid_layers):
            raise ValueError(f"mid_layers must be different layers, at least one, got {list(self.mid_layers)}")
        if len(set(self.feature_layers)) != len(self.feature_layers):
            raise ValueError(f"feature_layers must be different layers, got {list(self.feature_layers)}")
        if self.dtype not in STORED_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose from: {', '.join(STORED_DTYPES)}")
        if self.visual not in STORED_VISUALS:
            raise ValueError(f"visual is {self.visual!r}; choose from: {', '.join(STORED_VISUALS)}")
        if self.answers not in ("target", "dataset"):
            raise ValueError(f"answers is {self.answers!r}; choose from: target, dataset")
        if self.writer not in WRITERS:
            raise ValueError(f"writer is {self.writer!r}; choose from: {', '.join(WRITERS)}")
        for name in ("max_new_tokens", "max_tokens", "batch_size", "shard_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def writes_apart(self, device: torch.device) -> bool:
        """Whether a process writes, for a target on ``device``.

        On a CPU that is where the target runs too: a process would gain nothing, and importing torch costs seconds.
        """
        return self.writer == "process" or (self.writer == "auto" and device.type != "cpu")
