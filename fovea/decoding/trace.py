"""The generation trace: every metric, table and plot is computed from these records, and they are saved."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fovea.targets.base import Encoded


@dataclass
class Round:
    """One draft-verify iteration. Seconds are wall-clock, with the device synchronised at their ends.

    Attributes:
        draft_nodes: draft tokens in the tree, root not counted.
        tree_depth: depth of the deepest draft.
        accepted: draft tokens among ``committed`` (no bonus).
        committed: tokens committed in this round, bonus included, cut at EOS and cap.
        retrieval: (K, min(K_raw, K_max)) per node that retrieved evidence.
    """

    draft_nodes: int
    tree_depth: int
    accepted: int
    committed: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    retrieval: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class GenerationTrace:
    """One answer. ``tokens`` holds the first token (from the prefill) and everything committed by the rounds.

    An autoregressive answer has no rounds. ``finish`` is ``eos`` or ``cap``; ``total_s`` includes ``prefill_s``, and
    ``prefill_s`` includes the vision tower. ``notes`` holds what the proposer said about the request, by name.

    Of an answer that somebody else measured and published as text, ``tokens`` stays empty and ``counted`` says how many
    there were; what counts tokens asks ``num_tokens``.
    """

    key: str
    source: str
    method: str
    prompt_tokens: int
    visual_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    prefill_s: float = 0.0
    total_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    peak_memory_bytes: int = 0
    notes: dict[str, float] = field(default_factory=dict)
    counted: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, whether their ids are known or not."""
        return len(self.tokens) if self.counted is None else self.counted

    @classmethod
    def of(cls, encoded: Encoded, method: str, source: str) -> GenerationTrace:
        """The empty trace of a request."""
        return cls(encoded.key, source, method, encoded.ids.shape[0], int(encoded.is_visual.sum()))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> GenerationTrace:
        """The trace that :meth:`to_json` wrote."""
        rounds = [Round(**{**r, "retrieval": [tuple(k) for k in r["retrieval"]]}) for r in record["rounds"]]
        return cls(**{**record, "rounds": rounds})


def save_traces(path: Path | str, traces: Iterable[GenerationTrace]) -> None:
    """Writes one JSON object per line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(trace.to_json()) + "\n" for trace in traces)


def load_traces(path: Path | str) -> list[GenerationTrace]:
    """The traces that :func:`save_traces` wrote, in order."""
    with open(path, encoding="utf-8") as file:
        return [GenerationTrace.from_json(json.loads(line)) for line in file]
