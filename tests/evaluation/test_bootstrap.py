"""Confidence intervals: against a naive bootstrap, and against the truth where it is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fovea.decoding.trace import GenerationTrace, Round
from fovea.evaluation.bootstrap import BY_DEPTH, FIGURES, ratio_intervals, speed_intervals, tau_difference
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.results import ALL, PromptResult, SpeedResult
from fovea.targets.conversation import conversation_of


def pair(key: str, accepted: Sequence[int], token_s: float = 0.01) -> tuple[GenerationTrace, GenerationTrace]:
    rounds = [Round(5, 4, a, a + 1, 0.004 + 0.001 * a, 0.01, 0.02) for a in accepted]
    tokens = list(range(1 + sum(r.committed for r in rounds)))
    spec = GenerationTrace(key, "s", "m", 9, 0, tokens, "cap", 0.03, 0.03 + 0.02 * len(rounds), rounds)
    return spec, GenerationTrace(key, "s", "ar", 9, 0, tokens, "cap", 0.02, 0.02 + token_s * (len(tokens) - 1))


@pytest.fixture
def pairs() -> list[tuple[GenerationTrace, GenerationTrace]]:
    generator = np.random.default_rng(3)
    made = [pair(f"k{n}", generator.integers(0, 5, size=n % 4 + 1).tolist(), 0.01 + 0.001 * n) for n in range(9)]
    turns = [pair("talk#1", [1, 1]), pair("talk#2", [4]), pair("talk#10", [0])]
    return [*made, *turns]


def naive(pairs, resamples: int, seed: int) -> dict[str, tuple[float, float]]:
    """The same bootstrap with loops over resamples and traces, on draws of its own; only the definition is shared."""
    generator = np.random.default_rng(seed)
    by_conversation: dict[str, list] = {}
    for spec, ar in pairs:
        by_conversation.setdefault(spec.key.split("#")[0], []).append((spec, ar))
    names = (*FIGURES, *(f"{name} {k}" for name in BY_DEPTH for k in (1, 2, 3)))
    groups, values = list(by_conversation.values()), {name: [] for name in names}
    for _ in range(resamples):
        drawn = [p for place in generator.integers(len(groups), size=len(groups)) for p in groups[place]]
        rounds = [r for spec, _ in drawn for r in spec.rounds]
        values["tau"].append(sum(r.committed for r in rounds) / len(rounds))
        values["accepted_drafts_per_round"].append(sum(r.accepted for r in rounds) / len(rounds))
        values["speedup"].append(sum(ar.total_s for _, ar in drawn) / sum(spec.total_s for spec, _ in drawn))
        decode = [sum(t.total_s - t.prefill_s for t in side) for side in zip(*drawn, strict=True)]
        values["decode_speedup"].append(decode[1] / decode[0])
        whole = sum(spec.total_s for spec, _ in drawn)
        values["prefill_share"].append(sum(spec.prefill_s for spec, _ in drawn) / whole)
        values["draft_share"].append(sum(r.draft_s for r in rounds) / whole)
        values["verify_share"].append(sum(r.verify_s for r in rounds) / whole)
        values["mean_of_sample_speedups"].append(np.mean([ar.total_s / spec.total_s for spec, ar in drawn]))
        values["share_faster_than_ar"].append(np.mean([spec.total_s < ar.total_s for spec, ar in drawn]))
        for k in (1, 2, 3):
            reached = [r for r in rounds if r.accepted >= k]
            values[f"reach_rate {k}"].append(len(reached) / len(rounds))
            tried = [r for r in rounds if r.accepted >= k - 1 and r.tree_depth >= k]
            values[f"conditional_rate {k}"].append(len(reached) / len(tried))
    return {name: tuple(np.percentile(own, [2.5, 97.5])) for name, own in values.items()}


def flat(intervals: dict) -> dict:
    """A name per interval; those by depth have their depth behind it."""
    own = {name: intervals[name] for name in FIGURES}
    return own | {f"{name} {k}": b for name in BY_DEPTH for k, b in enumerate(intervals[name], start=1)}


def test_naive_bootstrap_agrees(pairs):
    """Other draws, so up to the noise of the quantiles of 40,000 resamples."""
    found = flat(speed_intervals(pairs, 40_000, seed=0))
    for name, expected in naive(pairs, 8_000, seed=11).items():
        width = expected[1] - expected[0]
        assert found[name] == pytest.approx(expected, abs=0.1 * width), name
        assert width > 0.002


def test_the_very_draws(pairs):
    """With the draws of the same generator every bound is met exactly; the conversations are in the order of keys."""
    ordered = sorted(pairs, key=lambda p: p[0].key.split("#")[0])
    found, expected = flat(speed_intervals(pairs, 200, seed=5)), naive(ordered, 200, seed=5)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name


def test_many_units_in_several_chunks():
    """A mean of 40,000 units: the interval is that of the central limit theorem."""
    x = np.random.default_rng(0).exponential(size=40_000)
    found, nothing = ratio_intervals(np.stack([x, np.ones_like(x), 0 * x], 1), [(0, 1), (0, 2)], 600, 1, 0.95)
    spread = x.std() / len(x) ** 0.5
    assert nothing is None
    assert found == pytest.approx([x.mean() - 1.96 * spread, x.mean() + 1.96 * spread], abs=0.3 * spread)


def test_coverage_where_the_truth_is_known():
    """Ratio of two sums that depend on each other; about 95 of 100 intervals must hold the ratio of the means."""
    generator = np.random.default_rng(7)
    held, trials, truth = 0, 400, 2.5
    for trial in range(trials):
        rounds = generator.integers(2, 30, size=60)
        committed = rounds + generator.binomial(3 * rounds, 0.5)  # 1 + 3 / 2 a round
        units = np.stack([committed, rounds], axis=1).astype(float)
        (bounds,) = ratio_intervals(units, [(0, 1)], 400, trial, 0.95)
        assert bounds is not None
        held += bounds[0] <= truth <= bounds[1]
    assert 0.91 <= held / trials <= 0.98  # 0.95 within four standard errors, less what 60 units cost


def test_turns_of_a_conversation_are_drawn_together():
    """Ten copies of a conversation's turn are as much as one."""
    apart = [pair(f"k{n}", [n % 3]) for n in range(12)]
    together = [pair(f"k{n}#{turn}", [n % 3]) for n in range(12) for turn in range(1, 11)]
    assert speed_intervals(together, 500)["tau"] == pytest.approx(speed_intervals(apart, 500)["tau"])
    assert conversation_of("a#b#12") == "a#b"
    assert conversation_of("a#b") == "a#b"


def test_the_order_of_prompts_and_the_number_of_ranks_do_not_matter(pairs):
    prompts = [PromptResult(spec, ar, Comparison(spec.key, "exact")) for spec, ar in pairs]
    whole = SpeedResult(prompts).figures()[ALL]["intervals"]
    for world in (2, 3):
        merged = SpeedResult.merged([SpeedResult(prompts[rank::world]) for rank in range(world)])
        assert [p.speculative.key for p in merged.prompts] != [p.speculative.key for p in prompts]
        assert merged.figures()[ALL]["intervals"] == whole
    assert speed_intervals(pairs, 100, seed=1) != speed_intervals(pairs, 100, seed=2)


def test_no_interval_where_there_is_none(pairs):
    nothing = dict.fromkeys(FIGURES)
    assert speed_intervals([]) == nothing | {name: [] for name in BY_DEPTH}
    nothing |= {name: [None] * 4 for name in BY_DEPTH}
    assert speed_intervals(pairs[:1]) == nothing
    assert speed_intervals(pairs[-3:]) == nothing, "one conversation of three turns"
    assert speed_intervals(pairs, 0) == nothing
    without = speed_intervals([pair("a", []), pair("b", [])])
    assert without["speedup"] is not None
    assert without["tau"] is without["decode_speedup"] is None
    once = speed_intervals([pair("a", [1]), pair("b", [])])
    assert once["accepted_drafts_per_round"] is None, "some resamples have no round"


def test_a_difference_is_drawn_prompt_by_prompt(pairs):
    """The same change on every prompt is certain, however much prompts differ; a naive loop gives the same bounds."""
    better = [pair(spec.key, [r.accepted + 1 for r in spec.rounds]) for spec, _ in pairs]
    difference, (low, high) = tau_difference(better, pairs)
    assert (difference, low, high) == pytest.approx((1, 1, 1))
    other = [pair(spec.key, [n % 5 for n, _ in enumerate(spec.rounds)]) for spec, _ in reversed(pairs)]
    found = tau_difference(other, pairs, 300, seed=4)
    keys = sorted({spec.key.split("#")[0] for spec, _ in pairs})
    generator, expected = np.random.default_rng(4), []
    for _ in range(300):
        drawn = [keys[place] for place in generator.integers(len(keys), size=len(keys))]
        taus = []
        for side in (other, pairs):
            rounds = [r for key in drawn for spec, _ in side if spec.key.split("#")[0] == key for r in spec.rounds]
            taus.append(sum(r.committed for r in rounds) / len(rounds))
        expected.append(taus[0] - taus[1])
    assert found[1] == pytest.approx(np.percentile(expected, [2.5, 97.5]).tolist(), rel=1e-12)


def test_no_difference_without_common_prompts(pairs):
    strangers = [pair(f"x{n}", [1]) for n in range(5)]
    assert tau_difference(strangers, pairs) is None
    assert tau_difference([*strangers, pairs[0]], pairs) is None, "one conversation in common"
    assert tau_difference(pairs, pairs, 0) is None
    assert tau_difference([pair("a", []), pair("b", [])], [pair("a", [1]), pair("b", [1])]) is None
