"""How a job ended, in its folder, where the summary of a sweep finds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

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
