"""The metrics of the visual-budget diagnostics against the golden vectors, and what their definitions imply."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea.evaluation.diagnostics import (
    DEFINITIONS,
    budget_figures,
    early_and_late,
    focus_figures,
    is_late,
    jaccard_distance,
    movements_of,
    states_of,
)
from fovea.visual.budget import retained_count, within_budget

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "diagnostics" / "diagnostics.json").read_text())
CLOSE = {"rel": 1e-9, "abs": 1e-12}


def close(value):
    return None if value is None else pytest.approx(value, **CLOSE)


@pytest.mark.parametrize("name", GOLDEN["budget"])
def test_golden_budgets(name):
    case = GOLDEN["budget"][name]
    expected = case["expected"]
    samples = [states_of(sample, case["ratios"]) for sample in case["accepted_drafts"]]
    states = [state for sample in samples for state in sample]
    for field in ("preferred", "range", "supply", "bin"):
        assert [getattr(state, field) for state in states] == expected[field], field
    assert [int(state.sensitive) for state in states] == expected["sensitive"]
    positions = [None if s.position is None else float(s.position) for s in states]
    assert positions == [close(position) for position in expected["position"]]

    figures = budget_figures(samples, case["ratios"])
    for field in ("states", "under", "over", "matched", "eligible_samples", "late_higher"):
        assert figures[field] == expected[field], field
    assert figures["late_higher_share"] == close(expected["late_higher_share"])
    shares = {float(ratio): share for ratio, share in figures["preferred_share"].items()}
    assert shares == {float(ratio): close(share) for ratio, share in expected["preferred_share"].items()}
    intervals = [figures["early"], figures["late"], *figures["bins"]]
    wanted = [expected["early"], expected["late"], *expected["bins"]]
    assert len(intervals) == len(wanted)
    for found, one in zip(intervals, wanted, strict=True):
        assert found == {field: close(value) for field, value in one.items()}


@pytest.mark.parametrize("name", GOLDEN["focus"])
def test_golden_focus(name):
    case = GOLDEN["focus"][name]
    samples = [movements_of(sets) for sets in case["sets"]]
    for found, expected in zip(samples, case["expected"]["samples"], strict=True):
        pairs = [(m.distance, float(m.midpoint), is_late(m.midpoint)) for m in found]
        assert pairs == [(close(p["distance"]), close(p["midpoint"]), p["late"]) for p in expected["pairs"]]
        means = early_and_late([(m.midpoint, m.distance) for m in found])
        assert means == (close(expected["early"]), close(expected["late"]))
    figures = focus_figures(samples)
    assert figures["eligible_samples"] == case["expected"]["eligible"]
    assert figures["late_higher"] == case["expected"]["late_higher"]
    assert figures["late_higher_share"] == close(case["expected"]["late_higher_share"])


@pytest.mark.parametrize("case", GOLDEN["retained_counts"], ids=lambda case: str(case["N"]))
def test_golden_retained_counts(case):
    ratios = (0, 0.25, 0.5, 0.75, 1)
    assert [retained_count(case["N"], ratio) for ratio in ratios] == case["kept"]


def test_a_ratio_is_the_decimal_number_that_is_written():
    assert [retained_count(100, ratio) for ratio in (0.29, 0.57, 0.58)] == [29, 57, 58]
    assert retained_count(0, 0.5) == retained_count(0, 1.0) == 0


@given(st.lists(st.lists(st.integers(0, 7), min_size=5, max_size=5), min_size=1, max_size=12))
def test_the_preferred_budget_is_the_least_of_the_best(sample):
    ratios = (0.0, 0.25, 0.5, 0.75, 1.0)
    for state, accepted in zip(states_of(sample, ratios), sample, strict=True):
        by_ratio = dict(zip(ratios, accepted, strict=True))
        assert by_ratio[state.preferred] == max(accepted)
        assert all(by_ratio[ratio] < max(accepted) for ratio in ratios if ratio < state.preferred)
        assert state.sensitive == (len(set(accepted)) > 1)


def test_other_budgets_can_be_compared():
    states = states_of([[3, 1, 2], [0, 2, 2]], (0.0, 0.5, 1.0), low=0.5, high=1.0)
    assert [state.supply for state in states] == ["under", "matched"]


def test_positions_are_exact():
    """However long a trajectory is, what lies at 0.6 of it is late, and in the seventh bin."""
    for iterations in range(6, 400, 5):
        states = states_of([[0] * 5] * iterations, (0.0, 0.25, 0.5, 0.75, 1.0))
        boundary = 3 * (iterations - 1) // 5
        assert states[boundary].position == Fraction(3, 5)
        assert states[boundary].bin == 6
        assert is_late(states[boundary].position)


def test_jaccard_distance():
    assert jaccard_distance([], []) == 0
    assert jaccard_distance([1, 2], [3]) == 1
    assert jaccard_distance([1, 2, 3], [2, 3, 4]) == pytest.approx(0.5)


def test_nothing_measured_is_undefined_not_zero():
    figures = budget_figures([], (0.0, 1.0))
    assert figures["preferred_share"] == {"0.0": None, "1.0": None}
    assert figures["all"]["best"] is figures["late_higher_share"] is None
    assert focus_figures([])["distance"] is None


def test_every_figure_has_a_definition():
    figures = budget_figures([], (0.0, 1.0))
    known = set(DEFINITIONS) | {"samples", "eligible_samples", "late_higher", "bins", "all"}
    assert set(figures) <= known
    assert set(figures["all"]) <= known


def test_the_most_important_visual_tokens_stay_and_equal_ones_by_lower_index():
    is_visual = torch.tensor([False, True, True, False, True, True, False])
    importance = torch.tensor([0.1, 0.3, 0.3, 0.2])
    kept = {ratio: within_budget(importance, is_visual, ratio).nonzero()[:, 0].tolist() for ratio in (0, 0.25, 0.6, 1)}
    assert kept == {0: [0, 3, 6], 0.25: [0, 2, 3, 6], 0.6: [0, 2, 3, 4, 6], 1: [0, 1, 2, 3, 4, 5, 6]}
