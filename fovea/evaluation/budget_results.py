"""What a visual-budget measurement leaves behind: accepted drafts under every budget, and the figures made of them.

A folder holds ``budget_samples.jsonl``, one answer per line, and ``budget.json`` with settings, what was left out, and
the figures; the samples alone give the figures again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fovea.evaluation.diagnostics import DEFINITIONS, budget_figures, focus_figures, movements_of, states_of
from fovea.evaluation.json_lines import made, read_lines, read_object, required
from fovea.evaluation.results import ALL
from fovea.files import write_text

BUDGET, BUDGET_SAMPLES = "budget.json", "budget_samples.jsonl"


@dataclass(frozen=True)
class BudgetSample:
    """One answer about pictures.

    Attributes:
        key, source: of the prompt.
        visual_tokens: N.
        answer_tokens: T.
        accepted: [I][R] A_s(r), draft tokens accepted per iteration and budget, no bonus.
        attended: [T] sets of visual tokens that the target attended to most; empty if it does not say.
        retrieved: [I] sets that the roots retrieved with full access; empty for a drafter that retrieves nothing.
    """

    key: str
    source: str
    visual_tokens: int
    answer_tokens: int
    accepted: list[list[int]]
    attended: list[list[int]]
    retrieved: list[list[int]]


@dataclass(frozen=True)
class BudgetResult:
    """A measurement.

    Attributes:
        samples: the answers about pictures.
        text_only: keys of prompts without a picture, which have no budget and are in no figure.
        failed: key of each conversation that could not be read -> why.
        settings: those of :class:`fovea.evaluation.visual_budget.BudgetConfig`, and how it was decoded; plain types.
    """

    samples: list[BudgetSample]
    text_only: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """The budgets."""
        return list(self.settings["ratios"])

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of every source, by name, and of all pooled, last: ``budget``, ``attended`` and ``retrieved``.

        The first are those of :func:`fovea.evaluation.diagnostics.budget_figures`, and ``mean_accepted``, drafts per
        iteration under each budget. The other two are those of ``focus_figures`` for the target's attention by steps of
        the answer, and for the roots' retrieval by iterations.
        """
        sources = sorted({sample.source for sample in self.samples})
        groups = {source or "(no source)": [s for s in self.samples if s.source == source] for source in sources}
        return {name: self._figures(own) for name, own in (groups | {ALL: self.samples}).items()}

    def _figures(self, samples: Sequence[BudgetSample]) -> dict[str, Any]:
        ratios = self.ratios
        limits = {"low": self.settings["low"], "high": self.settings["high"]}
        rows = [accepted for sample in samples for accepted in sample.accepted]
        columns = zip(*rows, strict=True) if rows else [()] * len(ratios)
        means = {str(r): sum(c) / len(c) if c else None for r, c in zip(ratios, columns, strict=True)}
        budget = budget_figures([states_of(sample.accepted, ratios, **limits) for sample in samples], ratios)
        return {
            "budget": budget | {"mean_accepted": means},
            "attended": focus_figures([movements_of(sample.attended) for sample in samples]),
            "retrieved": focus_figures([movements_of(sample.retrieved) for sample in samples]),
        }

    def save(self, folder: Path) -> None:
        """Writes samples and figures into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / BUDGET_SAMPLES, "".join(json.dumps(asdict(sample)) + "\n" for sample in self.samples))
        record = {
            "settings": self.settings,
            "text_only": self.text_only,
            "failed": self.failed,
            "figures": self.figures(),
            "definitions": DEFINITIONS,
        }
        write_text(folder / BUDGET, json.dumps(record, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> BudgetResult:
        """The result that :meth:`save` wrote.

        Raises:
            FileNotFoundError: the folder holds none.
            RecordError: a file of it is damaged.
        """
        if not (folder / BUDGET).is_file():
            raise FileNotFoundError(f"{folder} holds no {BUDGET}; measure it with evaluate.py diagnostics=budget")
        record, where = read_object(folder / BUDGET), str(folder / BUDGET)
        lines = read_lines(folder / BUDGET_SAMPLES)
        samples = [made(lambda fields: BudgetSample(**fields), sample, place) for place, sample in lines]
        text_only, failed = required(record, "text_only", list, where), required(record, "failed", dict, where)
        return cls(samples, text_only, failed, required(record, "settings", dict, where))
