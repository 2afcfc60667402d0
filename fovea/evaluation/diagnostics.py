"""The metrics of the visual-budget diagnostics (FOVEA, Appendix A): pure functions of counts and index sets.

A *state* is one draft-verify iteration; its row holds A_s(r), the draft tokens accepted (no bonus) under each visual
budget r. A *sample* is the list of its iterations. Positions are exact fractions of whole numbers, so that a state at
0.6 is late whatever the rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any, Literal

Supply = Literal["under", "over", "matched"]

#: Positions from here on are late; equal-width bins of the trajectory.
LATE_FROM, BINS = Fraction(6, 10), 10

#: What the figures mean, for reports.
DEFINITIONS = {
    "states": "draft-verify iterations, over all samples",
    "preferred_share": "share of the states whose preferred budget it is: the smallest budget that accepts the most "
    "drafts (Eq. 22)",
    "under": "states in which the low budget accepts fewer drafts than the high one (Eq. 23)",
    "over": "states in which it accepts more (Eq. 24)",
    "matched": "states in which both accept as many (Eq. 25)",
    "best": "mean of the preferred budget over states",
    "range": "mean over states of the most drafts that a budget accepts minus the fewest (Eq. 27)",
    "sensitive": "share of the states whose range is above 0 (Eq. 28)",
    "early": "states at p < 0.6, where p is the iteration's number over that of the last one (Eq. 26)",
    "late": "states at p >= 0.6; a sample of one iteration has no position",
    "late_higher_share": "share of the samples with early and late states whose late mean is above the early one",
    "distance": "Jaccard distance of the sets of adjacent steps (Eq. 29), at the midpoint of their positions",
}


@dataclass(frozen=True)
class State:
    """One decoding state.

    Attributes:
        preferred: B_s, Eq. 22.
        range: G_s, Eq. 27, in draft tokens.
        supply: Eq. 23 to 25.
        position: p, Eq. 26; None for the only iteration of a sample.
    """

    preferred: float
    range: int
    supply: Supply
    position: Fraction | None

    @property
    def sensitive(self) -> bool:
        """S_s, Eq. 28."""
        return self.range > 0

    @property
    def bin(self) -> int | None:
        """b, Eq. 26."""
        return None if self.position is None else bin_of(self.position)


@dataclass(frozen=True)
class Movement:
    """The focus between two adjacent steps: D_t of Eq. 29, and the midpoint of their positions."""

    distance: float
    midpoint: Fraction


def states_of(
    sample: Sequence[Sequence[int]], ratios: Sequence[float], *, low: float = 0.25, high: float = 0.75
) -> list[State]:
    """The states of a sample.

    Args:
        sample: [I][R] A_s(r), no bonus.
        ratios: [R] the budgets, ascending.
        low: the budget that may be under- or over-supplied, one of ``ratios``.
        high: the budget that it is compared with, likewise.
    """
    low_place, high_place = ratios.index(low), ratios.index(high)
    states = []
    for number, accepted in enumerate(sample):
        less, more = accepted[low_place], accepted[high_place]
        supply: Supply = "under" if less < more else "over" if less > more else "matched"
        best = max(accepted)
        position = Fraction(number, len(sample) - 1) if len(sample) > 1 else None
        states.append(State(ratios[accepted.index(best)], best - min(accepted), supply, position))
    return states


def bin_of(position: Fraction) -> int:
    """Of :data:`BINS` equal-width bins, the one that ``position`` in [0, 1] falls into (Eq. 26)."""
    return min(BINS - 1, int(BINS * position))


def is_late(position: Fraction) -> bool:
    """Whether ``position`` belongs to the late interval."""
    return position >= LATE_FROM


def budget_figures(samples: Sequence[Sequence[State]], ratios: Sequence[float]) -> dict[str, Any]:
    """The figures of :data:`DEFINITIONS` over the states of ``samples``, in plain types; None where undefined."""
    states = [state for sample in samples for state in sample]
    placed = [state for state in states if state.position is not None]
    preferred = [state.preferred for state in states]
    supply = [state.supply for state in states]
    return {
        "samples": len(samples),
        "states": len(states),
        "preferred_share": {str(r): preferred.count(r) / len(states) if states else None for r in ratios},
        **{name: supply.count(name) for name in ("under", "over", "matched")},
        "all": _means(states),
        "early": _means([s for s in placed if not is_late(s.position)]),  # type: ignore[arg-type]
        "late": _means([s for s in placed if is_late(s.position)]),  # type: ignore[arg-type]
        "bins": [_means([s for s in placed if s.bin == number]) for number in range(BINS)],
        **_late_higher([[(s.position, s.preferred) for s in sample if s.position is not None] for sample in samples]),
    }


def jaccard_distance(first: Collection[int], second: Collection[int]) -> float:
    """1 - |A and B| / |A or B|; 0 for two empty sets."""
    first, second = set(first), set(second)
    union = first | second
    return 1 - len(first & second) / len(union) if union else 0.0


def movements_of(sets: Sequence[Collection[int]]) -> list[Movement]:
    """The movements between the adjacent ones of ``sets`` F_1 to F_T; the position of step t is (t - 1) / (T - 1)."""
    return [
        Movement(jaccard_distance(sets[place], sets[place + 1]), Fraction(2 * place + 1, 2 * (len(sets) - 1)))
        for place in range(len(sets) - 1)
    ]


def focus_figures(samples: Sequence[Sequence[Movement]]) -> dict[str, Any]:
    """Movements, their mean distance over all, early and late ones and by bin, and the comparison sample by sample."""
    movements = [movement for sample in samples for movement in sample]
    return {
        "samples": len(samples),
        "movements": len(movements),
        "distance": _mean([m.distance for m in movements]),
        "early": _mean([m.distance for m in movements if not is_late(m.midpoint)]),
        "late": _mean([m.distance for m in movements if is_late(m.midpoint)]),
        "bins": [_mean([m.distance for m in movements if bin_of(m.midpoint) == number]) for number in range(BINS)],
        **_late_higher([[(m.midpoint, m.distance) for m in sample] for sample in samples]),
    }


def early_and_late(values: Sequence[tuple[Fraction, float]]) -> tuple[float | None, float | None]:
    """Means of the values at early and at late positions; None where there are none."""
    early = _mean([value for position, value in values if not is_late(position)])
    late = _mean([value for position, value in values if is_late(position)])
    return early, late


def _late_higher(samples: Sequence[Sequence[tuple[Fraction, float]]]) -> dict[str, Any]:
    """Of the samples with values in both intervals, those whose late mean is strictly above the early one."""
    both = [(early, late) for early, late in map(early_and_late, samples) if early is not None and late is not None]
    higher = sum(late > early for early, late in both)
    return {
        "eligible_samples": len(both),
        "late_higher": higher,
        "late_higher_share": higher / len(both) if both else None,
    }


def _means(states: Sequence[State]) -> dict[str, Any]:
    return {
        "states": len(states),
        "best": _mean([state.preferred for state in states]),
        "range": _mean([state.range for state in states]),
        "sensitive": _mean([state.sensitive for state in states]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
