"""Confidence intervals of pooled ratios: how much they would move with other prompts of the same kind.

The percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) over conversations:
turns of one conversation share pictures and text, so they are drawn together. Conversations are put in the order of
their keys first; so the intervals are the same, however many ranks have measured.

A mean over answers is a ratio of sums too, whose denominator counts answers. A largest value, such as the peak of the
memory, has no interval: resamples never hold more than the sample, so the bootstrap of a maximum is not consistent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.decoding.trace import GenerationTrace
from fovea.targets.conversation import conversation_of

#: Chance that an interval is meant to cover the value of all prompts of the kind.
CONFIDENCE = 0.95
#: Default number of resamples.
RESAMPLES = 1000
#: Figures with an interval, by their names in :data:`fovea.evaluation.metrics.DEFINITIONS`.
FIGURES: tuple[str, ...] = (
    *("tau", "accepted_drafts_per_round", "speedup", "decode_speedup"),
    *("prefill_share", "draft_share", "verify_share"),  # of ``time_share``
    *("mean_of_sample_speedups", "share_faster_than_ar"),
)
#: Figures with a list of intervals, one per depth of the draft, likewise.
BY_DEPTH: tuple[str, ...] = ("reach_rate", "conditional_rate")
#: Sums behind them, without those by depth.
_SUMS = 13

#: Counts of conversations that are drawn at a time.
_CHUNK = 1 << 21

#: A speculative and an autoregressive answer to one prompt.
Pair = tuple[GenerationTrace, GenerationTrace]
#: Lower and upper bound.
Interval = list[float]


def speed_intervals(
    pairs: Sequence[Pair], resamples: int = RESAMPLES, *, seed: int = 0, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """An interval per figure of :data:`FIGURES`, and a list of them per figure of :data:`BY_DEPTH`.

    None where there is none, as :func:`ratio_intervals` says.
    """
    depths = max((r.tree_depth for speculative, _ in pairs for r in speculative.rounds), default=0)
    sums = _by_conversation(pairs, depths)
    units = np.array([sums[key] for key in sorted(sums)]).reshape(-1, _SUMS + 2 * depths)
    rounds, committed, accepted, spec, ar, spec_decode, ar_decode, prefill, draft, verify, answers, ratio, faster = (
        range(_SUMS)
    )
    ratios = [(committed, rounds), (accepted, rounds), (ar, spec), (ar_decode, spec_decode)]
    ratios += [(part, spec) for part in (prefill, draft, verify)]
    ratios += [(ratio, answers), (faster, answers)]
    reached, tried = (range(_SUMS + place * depths, _SUMS + (place + 1) * depths) for place in (0, 1))
    ratios += [(column, rounds) for column in reached] + list(zip(reached, tried, strict=True))
    intervals = ratio_intervals(units, ratios, resamples, seed, confidence)
    by_depth = intervals[len(FIGURES) :]
    found: dict[str, Any] = dict(zip(FIGURES, intervals, strict=False))
    found |= dict(zip(BY_DEPTH, (by_depth[:depths], by_depth[depths:]), strict=True))
    if found["tau"] is None:  # without rounds nothing was decoded speculatively
        found["decode_speedup"] = None
    return found


def tau_difference(
    changed: Sequence[Pair],
    whole: Sequence[Pair],
    resamples: int = RESAMPLES,
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[float, Interval] | None:
    """tau of one evaluation minus that of another, and its interval, over the conversations that both have answered.

    Both are drawn together, conversation by conversation, so that what makes a prompt hard cancels. None where
    :func:`ratio_intervals` has no interval for one of them.
    """
    first, second = _by_conversation(changed), _by_conversation(whole)
    keys = sorted(first.keys() & second.keys())
    units = np.array([[*first[key][:2], *second[key][:2]] for key in keys]).reshape(-1, 4)
    if len(units) < 2 or resamples < 1:
        return None
    drawn = _resampled(units, resamples, seed)
    if (drawn[:, [0, 2]] <= 0).any():
        return None
    differences = drawn[:, 1] / drawn[:, 0] - drawn[:, 3] / drawn[:, 2]
    total = units.sum(0)
    return total[1] / total[0] - total[3] / total[2], np.quantile(differences, _tails(confidence)).tolist()


def ratio_intervals(
    units: np.ndarray, ratios: Sequence[tuple[int, int]], resamples: int, seed: int, confidence: float
) -> list[Interval | None]:
    """Percentile intervals of ratios of sums.

    Args:
        units: [N, F] what each independent unit adds to F sums.
        ratios: numerator and denominator of each ratio, as columns of ``units``.
        resamples: how often N units are drawn with replacement.
        seed: of the draws.
        confidence: share of the resampled ratios inside an interval.

    Returns:
        Bounds per ratio; None with fewer than two units, and where a resample leaves a ratio undefined.
    """
    if len(units) < 2 or resamples < 1:
        return [None] * len(ratios)
    sums = _resampled(units, resamples, seed)
    intervals: list[Interval | None] = []
    for above, below in ratios:
        if (sums[:, below] <= 0).any():
            intervals.append(None)
        else:
            intervals.append(np.quantile(sums[:, above] / sums[:, below], _tails(confidence)).tolist())
    return intervals


def _by_conversation(pairs: Sequence[Pair], depths: int = 0) -> dict[str, np.ndarray]:
    """What each conversation adds to the sums, rounds and committed tokens first.

    Behind the others stand, for each of the ``depths`` k, the rounds that accepted k drafts or more, and then those
    that accepted k - 1 or more of a tree that was k deep.
    """
    sums: dict[str, np.ndarray] = {}
    for speculative, autoregressive in pairs:
        unit = sums.setdefault(conversation_of(speculative.key), np.zeros(_SUMS + 2 * depths))
        rounds = speculative.rounds
        unit += (
            len(rounds),
            sum(r.committed for r in rounds),
            sum(r.accepted for r in rounds),
            speculative.total_s,
            autoregressive.total_s,
            speculative.total_s - speculative.prefill_s,
            autoregressive.total_s - autoregressive.prefill_s,
            speculative.prefill_s,
            sum(r.draft_s for r in rounds),
            sum(r.verify_s for r in rounds),
            1,
            autoregressive.total_s / speculative.total_s,
            speculative.total_s < autoregressive.total_s,
            *(sum(r.accepted >= k for r in rounds) for k in range(1, depths + 1)),
            *(sum(r.accepted >= k - 1 and r.tree_depth >= k for r in rounds) for k in range(1, depths + 1)),
        )
    return sums


def _resampled(units: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """[resamples, F] sums over N of the N ``units`` [N, F], drawn with replacement."""
    count = len(units)
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    parts = []
    for begin in range(0, resamples, rows):
        size = min(rows, resamples - begin)
        drawn = generator.integers(count, size=(size, count)) + count * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        parts.append(times @ units)
    return np.concatenate(parts)


def _tails(confidence: float) -> list[float]:
    return [(1 - confidence) / 2, (1 + confidence) / 2]
