"""A speed evaluation as trackers see it: scalars for all, tables, histograms and pictures for W&B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fovea.decoding.trace import GenerationTrace
from fovea.evaluation.plots import acceptance_by_depth, retrieval_cardinality
from fovea.evaluation.results import ALL, EVIDENCE, SpeedResult

_PER_SOURCE = ("tau", "speedup", "decode_speedup")


def scalars(result: SpeedResult) -> dict[str, float]:
    """Everything about a result that is one number; what is undefined is left out."""
    figures = result.figures()
    pooled = figures[ALL]
    out: dict[str, float | None] = {f"speed/{name}": value for name, value in result.summary().items()}
    out["speed/unexplained_differences"] = pooled["unexplained"]
    out["speed/failed_prompts"] = len(result.failed)
    for name in ("reach", "conditional"):
        for depth, rate in enumerate(pooled[f"{name}_rate"], start=1):
            out[f"acceptance/{name}_{depth}"] = rate
    cardinalities = _cardinalities(result.speculative)
    if len(cardinalities):
        out["retrieval/k_mean"] = float(cardinalities.mean())
        out["retrieval/k_median"] = float(np.median(cardinalities))
    for source, own in figures.items():
        if source != ALL:
            out |= {f"speed/{source}/{name}": own[name] for name in _PER_SOURCE}
    return {name: float(value) for name, value in out.items() if value is not None}


def log_to_wandb(run: Any, result: SpeedResult, folder: Path, global_step: int) -> None:
    """Histograms, a table with a row per answer, and pictures; ``folder`` holds the evidence picture, if there is one.

    The step travels as a metric, as Lightning's logger does it: an explicit one would have to grow with every call.
    """
    import wandb

    columns, rows = answer_table(result)
    answers: dict[str, Any] = {"columns": columns, "data": rows}
    record: dict[str, Any] = {
        "trainer/global_step": global_step,
        "speed/answers": wandb.Table(**answers),
    }
    pooled = result.figures()[ALL]
    if pooled["rounds"]:
        accepted = [r.accepted for trace in result.speculative for r in trace.rounds]
        record["acceptance/accepted_drafts"] = wandb.Histogram(accepted)
        record["acceptance/by_depth"] = wandb.Image(acceptance_by_depth(pooled))
    cardinalities = _cardinalities(result.speculative)
    if len(cardinalities):
        record["retrieval/k"] = wandb.Histogram(cardinalities.tolist())
        record["retrieval/cardinality"] = wandb.Image(
            retrieval_cardinality(result.speculative, result.retrieval_limits)
        )
    if (folder / EVIDENCE).is_file():
        record["retrieval/evidence"] = wandb.Image(str(folder / EVIDENCE))
    run.log(record)


_ANSWER_COLUMNS = ("key", "source", "tokens", "rounds", "tau", "accepted", "speedup", "tokens_per_s", "outcome")


def answer_table(result: SpeedResult) -> tuple[list[str], list[list[Any]]]:
    """Columns, and a row per answer."""
    rows = []
    for prompt in result.prompts:
        trace, baseline = prompt.speculative, prompt.autoregressive
        committed = sum(r.committed for r in trace.rounds)
        rows.append(
            [
                trace.key,
                trace.source,
                len(trace.tokens),
                len(trace.rounds),
                committed / len(trace.rounds) if trace.rounds else None,
                " ".join(str(r.accepted) for r in trace.rounds),
                baseline.total_s / trace.total_s,
                len(trace.tokens) / trace.total_s,
                prompt.comparison.outcome,
            ]
        )
    return list(_ANSWER_COLUMNS), rows


def _cardinalities(traces: list[GenerationTrace]) -> np.ndarray:
    return np.array([k for trace in traces for r in trace.rounds for k, _ in r.retrieval])
