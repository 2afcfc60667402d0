"""The course of a training run, read back from its folder: logged losses, and the evaluation after each epoch."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.evaluation.json_lines import RecordError, made, read_object
from fovea.evaluation.results import ALL, EVALUATION, TRACES

#: Folders of a run: all evaluations, one per epoch, and the one of the finished drafter.
EVALUATIONS, EPOCH, FINAL = "evaluation", "epoch_{:02d}", "final"
_EPOCH = re.compile(r"epoch_(\d+)")
#: Columns of the log that are curves: the training loss and its terms, the share of drafts that agree with the teacher
#: at each step of the unrolled training, and the loss on held-out samples.
_CURVES = re.compile(r"train/(?P<loss>loss\w*)|train/top1_(?P<agreement>step_\d+)|val/(?P<validation>loss)")

#: Optimizer steps and values.
Curve = tuple[list[int], list[float]]


def reported_evaluation(run: Path) -> Path:
    """Folder of the final evaluation of ``run``, or of its last epoch; those that were cut short do not count.

    Raises:
        FileNotFoundError: there is neither.
    """
    folders = [*(folder for _, folder in _epochs(run)), run / EVALUATIONS / FINAL]
    found = [folder for folder in folders if (folder / TRACES).is_file()]
    if not found:
        raise FileNotFoundError(f"{run} holds no speed evaluation; give the folder of a run with {EVALUATIONS}/ in it")
    return found[-1]


@dataclass(frozen=True)
class TrainingHistory:
    """What was logged along the way.

    Attributes:
        losses: name of each loss term -> its curve.
        agreement: draft step, such as ``step_1`` -> share of rows in which the draft's best token is the teacher's.
        validation: curve of the loss on held-out samples, empty if there are none.
        evaluations: epoch, from 1, and the pooled figures measured after it.
    """

    losses: dict[str, Curve] = field(default_factory=dict)
    agreement: dict[str, Curve] = field(default_factory=dict)
    validation: Curve = field(default_factory=lambda: ([], []))
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @classmethod
    def read(cls, run: Path) -> TrainingHistory:
        """The history of the run in the folder ``run``; empty where nothing was logged.

        Raises:
            RecordError: a log, or the figures of an epoch, are damaged.
        """
        history = cls()
        for path in sorted(run.rglob("metrics.csv")):
            history._read_log(path)
        for epoch, folder in _epochs(run):
            if (path := folder / EVALUATION).is_file():
                figures = made(lambda record: dict(record["figures"][ALL]), read_object(path), str(path))
                history.evaluations.append((epoch, figures))
        return history

    def _read_log(self, path: Path) -> None:
        """Takes the curves out of the log of one logger."""
        with path.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            try:
                for row in rows:
                    self._add(row)
            except (csv.Error, KeyError, ValueError) as error:
                where = f"{path}, line {rows.line_num}"
                raise RecordError(f"{where}: no row of a log, {type(error).__name__}: {error}") from None

    def _add(self, row: dict[str, str]) -> None:
        """Takes the curves out of a row of the log, which has a step and some of the columns."""
        for column, value in row.items():
            if value and row["step"] and (found := _CURVES.fullmatch(column)):
                if found["validation"]:
                    steps, values = self.validation
                elif found["loss"]:
                    steps, values = self.losses.setdefault(found["loss"], ([], []))
                else:
                    steps, values = self.agreement.setdefault(found["agreement"], ([], []))
                steps.append(int(row["step"]))
                values.append(float(value))


def _epochs(run: Path) -> list[tuple[int, Path]]:
    """The evaluations after epochs of training, in their order, by number."""
    found = [(_EPOCH.fullmatch(path.name), path) for path in (run / EVALUATIONS).glob("epoch_*")]
    return sorted((int(match[1]), path) for match, path in found if match)
