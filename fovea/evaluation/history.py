"""The course of a training run, read back from its folder: logged losses, and the evaluation after each epoch."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.evaluation.results import ALL, EVALUATION

#: Folders of a run: all evaluations, one per epoch, and the one of the finished drafter.
EVALUATIONS, EPOCH, FINAL = "evaluation", "epoch_{:02d}", "final"
_EPOCH = re.compile(r"epoch_(\d+)")
#: Loss curves are logged under this name and its terms.
LOSS = re.compile(r"train/(loss(?:_\w+)?)(?:_step)?")


@dataclass(frozen=True)
class TrainingHistory:
    """What was logged along the way.

    Attributes:
        losses: name of each loss term -> optimizer steps and values.
        evaluations: epoch, from 1, and the pooled figures measured after it.
    """

    losses: dict[str, tuple[list[int], list[float]]]
    evaluations: list[tuple[int, dict[str, Any]]]

    @classmethod
    def read(cls, run: Path) -> TrainingHistory:
        """The history of the run in the folder ``run``; empty where nothing was logged."""
        losses: dict[str, tuple[list[int], list[float]]] = {}
        for path in sorted(run.rglob("metrics.csv")):
            with path.open(newline="", encoding="utf-8") as stream:
                for row in csv.DictReader(stream):
                    _add_losses(losses, row)
        evaluations = []
        for folder in sorted((run / EVALUATIONS).glob("epoch_*")):
            if (found := _EPOCH.fullmatch(folder.name)) and (folder / EVALUATION).is_file():
                record = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
                evaluations.append((int(found[1]), record["figures"][ALL]))
        return cls(losses, sorted(evaluations, key=lambda item: item[0]))


def _add_losses(losses: dict[str, tuple[list[int], list[float]]], row: dict[str, str]) -> None:
    for column, value in row.items():
        if value and row.get("step") and (name := LOSS.fullmatch(column)):
            steps, values = losses.setdefault(name[1], ([], []))
            steps.append(int(row["step"]))
            values.append(float(value))
