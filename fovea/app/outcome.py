"""How a job ended, in its folder, where the summary of a sweep finds it."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fovea.files import write_text

FILE = "outcome.json"


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        overrides: as typed, or as the sweep set them.
        metrics: headline numbers by name.
        error: its message, if it failed.
    """

    overrides: list[str]
    status: Literal["interrupted", "failed", "completed"] = "interrupted"
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def write(self, folder: Path) -> None:
        """Writes it into the job's ``folder``."""
        write_text(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """The outcome in the job's ``folder``."""
        return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))

    def fields(self) -> dict[str, str]:
        """Overridden fields and their values."""
        return dict(override.split("=", 1) for override in self.overrides if "=" in override)

    def optimized(self, names: str | Sequence[str]) -> Any:
        """The metric that is called so, or a list of several; None where it is missing."""
        return self.metrics.get(names) if isinstance(names, str) else [self.metrics.get(name) for name in names]


def ending(code: int) -> str:
    """How a process ended, by its exit code; a negative one is minus the signal that killed it."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}"
