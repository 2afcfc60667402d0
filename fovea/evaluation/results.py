"""What a speed evaluation leaves behind: every prompt's answers as traces, and the figures computed from them.

A folder holds ``traces.jsonl``, one prompt per line, and ``evaluation.json`` with settings, prompts that failed, and
the figures, and mostly ``evidence.png``; the traces alone give the figures again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fovea.decoding.trace import GenerationTrace
from fovea.evaluation.bootstrap import RESAMPLES, speed_intervals
from fovea.evaluation.json_lines import RecordError, made, read_lines, read_object, required
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.metrics import DEFINITIONS as METRICS
from fovea.evaluation.metrics import SpeedMetrics
from fovea.files import write_text

TRACES, EVALUATION, EVIDENCE = "traces.jsonl", "evaluation.json", "evidence.png"
#: Name of the row that pools all families.
ALL = "all"
#: Setting that counts the answers which were measured before an evaluation was cut short and resumed.
CONTINUED = "answers_before_resuming"
#: Setting of a result: how many processes shared the prompts when these were answered, if another number did.
CONTINUED_FROM = "processes_before_resuming"

#: What each figure means; printed beside it.
DEFINITIONS = METRICS | {
    "exact": "answers equal to the autoregressive ones, token for token",
    "ties": "answers that leave them at a near-tie of the target's own half-precision logits, or of a draw",
    "unexplained": "answers that differ for no such reason; one fails the evaluation",
    "exact_matches": "exact / samples",
    "differ_from_transformers": "answers that transformers' generate gives otherwise than the autoregressive loop, of "
    "those that both gave; not compared where tokens are drawn",
    "ar_token_ms": "milliseconds per autoregressive token, without the prefill",
    "intervals": "95 % percentile bootstrap: conversations are drawn with replacement, turns of one together; "
    "none with a single conversation, or where a resample leaves the ratio undefined",
}


class LosslessnessError(RuntimeError):
    """A speculative answer differs from the autoregressive one, and no near-tie explains it."""


@dataclass(frozen=True)
class PromptResult:
    """One prompt answered every way, side by side in one run.

    Attributes:
        speculative: the drafter's answer.
        autoregressive: the baseline's.
        comparison: whether their tokens agree.
        transformers: answer of transformers' ``generate``, where it was measured too.
    """

    speculative: GenerationTrace
    autoregressive: GenerationTrace
    comparison: Comparison
    transformers: GenerationTrace | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PromptResult:
        """The result that :meth:`to_json` wrote."""
        reference = record["transformers"]
        return cls(
            GenerationTrace.from_json(record["speculative"]),
            GenerationTrace.from_json(record["autoregressive"]),
            Comparison(**record["comparison"]),
            GenerationTrace.from_json(reference) if reference else None,
        )


@dataclass(frozen=True)
class SpeedResult:
    """A speed evaluation.

    Attributes:
        prompts: one entry per answered prompt.
        failed: key of each prompt that could not be read -> why.
        settings: how it was decoded; plain types.
    """

    prompts: list[PromptResult]
    failed: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Sequence[SpeedResult]) -> SpeedResult:
        """All ranks' results as one; the settings are the first one's, with the answers that all of them continued."""
        failed = {key: why for part in parts for key, why in part.failed.items()}
        continued = sum(part.settings.get(CONTINUED, 0) for part in parts)
        settings = parts[0].settings | ({CONTINUED: continued} if continued else {})
        if shared := {count for part in parts for count in part.settings.get(CONTINUED_FROM, ())}:
            settings[CONTINUED_FROM] = sorted(shared)
        return cls([prompt for part in parts for prompt in part.prompts], failed, settings)

    @property
    def speculative(self) -> list[GenerationTrace]:
        """The drafter's traces."""
        return [prompt.speculative for prompt in self.prompts]

    @property
    def retrieval_limits(self) -> tuple[int, int] | None:
        """K_min and K_max of the mass rule, if that is how evidence was retrieved."""
        rule = self.settings.get("retrieval", {})
        return (rule["k_min"], rule["k_max"]) if rule.get("mode") == "mass" else None

    def figures(self) -> dict[str, dict[str, Any]]:
        """The numbers of every source, by name, and of all pooled, last.

        Beside those of :data:`fovea.evaluation.metrics.DEFINITIONS`: ``exact_matches`` (share), the counts ``exact``,
        ``ties`` and ``unexplained``, the count ``differ_from_transformers`` for all pooled, ``ar_token_ms``,
        milliseconds per autoregressive token without the prefill, and
        ``intervals``, those of :func:`fovea.evaluation.bootstrap.speed_intervals`.
        """
        sources = sorted({prompt.speculative.source for prompt in self.prompts})
        deepest = max((r.tree_depth for trace in self.speculative for r in trace.rounds), default=1)
        # The traces of all ranks are here already, so there is nothing to sum over ranks.
        metrics = SpeedMetrics(sources, max(1, deepest), sync_on_compute=False)
        for prompt in self.prompts:
            metrics.update(prompt.speculative, prompt.autoregressive, prompt.transformers)
        computed = metrics.compute()
        out = {}
        for source in sources:
            own = [prompt for prompt in self.prompts if prompt.speculative.source == source]
            out[source or "(no source)"] = computed["per_source"][source] | _comparisons(own) | self._intervals(own)
        out[ALL] = computed["all"] | _comparisons(self.prompts) | self._intervals(self.prompts)
        out[ALL]["differ_from_transformers"] = len(self.differ_from_transformers)
        return out

    @property
    def differ_from_transformers(self) -> list[str]:
        """Keys of the prompts that transformers' ``generate`` answers otherwise than the autoregressive loop.

        Nothing is compared where answers are drawn, since it draws by other random numbers. In half precision a
        near-tie may part the two; in float32 they are equal, or the target is run otherwise than its model would be.
        """
        if self.settings.get("selection", {}).get("temperature"):
            return []
        return [
            prompt.autoregressive.key
            for prompt in self.prompts
            if prompt.transformers is not None and prompt.transformers.tokens != prompt.autoregressive.tokens
        ]

    def _intervals(self, prompts: Sequence[PromptResult]) -> dict[str, Any]:
        pairs = [(prompt.speculative, prompt.autoregressive) for prompt in prompts]
        return {"intervals": speed_intervals(pairs, self.settings.get("resamples", RESAMPLES))}

    def summary(self) -> dict[str, float]:
        """The headline numbers, pooled over all prompts; those that are undefined are left out."""
        pooled = self.figures()[ALL]
        named = {
            "tau": pooled["tau"],
            "accepted": pooled["accepted_drafts_per_round"],
            "speedup": pooled["speedup"],
            "decode_speedup": pooled["decode_speedup"],
            "speedup_over_transformers": pooled["speedup_over_transformers"],
            "exact_matches": pooled["exact_matches"],
        }
        return {name: float(value) for name, value in named.items() if value is not None}

    def require_lossless(self) -> None:
        """Raises:
        LosslessnessError: an answer differs from the baseline's and no near-tie explains it.
        """
        wrong = [prompt for prompt in self.prompts if prompt.comparison.outcome == "unexplained"]
        if wrong:
            first = wrong[0]
            raise LosslessnessError(
                f"{len(wrong)} of {len(self.prompts)} speculative answers differ from the autoregressive ones without "
                f"a near-tie of the target's logits, first '{first.speculative.key}': {first.comparison}"
            )

    def save(self, folder: Path) -> None:
        """Writes traces and figures into ``folder``; the traces come last, and mark a finished evaluation."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRACES).unlink(missing_ok=True)  # those of an earlier one would pass for these figures'
        record = {"settings": self.settings, "failed": self.failed, "figures": self.figures()}
        write_text(folder / EVALUATION, json.dumps(record, indent=2) + "\n")
        write_text(folder / TRACES, "".join(json.dumps(prompt.to_json()) + "\n" for prompt in self.prompts))

    @classmethod
    def load(cls, folder: Path) -> SpeedResult:
        """The result that :meth:`save` wrote.

        Raises:
            FileNotFoundError: the folder holds none.
            RecordError: a file of it is damaged, or lacks answers.
        """
        if not (folder / TRACES).is_file():
            raise FileNotFoundError(f"{folder} holds no {TRACES}; give the folder of a finished evaluation")
        path = folder / EVALUATION
        prompts = [made(PromptResult.from_json, record, where) for where, record in read_lines(folder / TRACES)]
        record = read_object(path)
        failed, settings, figures = (
            required(record, name, dict, str(path)) for name in ("failed", "settings", "figures")
        )
        counted = required(required(figures, ALL, dict, f"{path}: 'figures'"), "samples", int, f"{path}: '{ALL}'")
        if len(prompts) != counted:
            raise RecordError(
                f"{folder / TRACES} holds {len(prompts)} answers and {EVALUATION} counts {counted}: a file was cut or "
                "replaced; measure again"
            )
        return cls(prompts, failed, settings)


def _comparisons(prompts: Sequence[PromptResult]) -> dict[str, Any]:
    outcomes = Counter(prompt.comparison.outcome for prompt in prompts)
    tokens = sum(len(prompt.autoregressive.tokens) - 1 for prompt in prompts)
    seconds = sum(prompt.autoregressive.total_s - prompt.autoregressive.prefill_s for prompt in prompts)
    return {
        "exact": outcomes["exact"],
        "ties": outcomes["tie"],
        "unexplained": outcomes["unexplained"],
        "exact_matches": outcomes["exact"] / len(prompts) if prompts else None,
        "ar_token_ms": 1e3 * seconds / tokens if tokens else None,
    }
