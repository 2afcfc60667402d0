"""Speed metrics against the golden traces, and their sums over ranks."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from fovea.decoding.trace import GenerationTrace, Round
from fovea.evaluation.metrics import DEFINITIONS, SpeedMetrics

CASES = json.loads((Path(__file__).parents[1] / "golden" / "metrics" / "traces.json").read_text())


def traces(sample: dict) -> tuple[GenerationTrace, GenerationTrace]:
    rounds = [
        Round(r["draft_nodes"], r["tree_depth"], r["accepted"], len(r["committed"]), draft_s=1e-4, total_s=2e-4)
        for r in sample["rounds"]
    ]
    tokens = [sample["first_token"], *(token for r in sample["rounds"] for token in r["committed"])]
    speculative, autoregressive = (
        GenerationTrace(
            key=sample["id"],
            source=sample["benchmark"],
            method=method,
            prompt_tokens=9,
            visual_tokens=0,
            tokens=tokens,
            prefill_s=sample[f"{method}_prefill_s"],
            total_s=sample[f"{method}_total_s"],
        )
        for method in ("spec", "ar")
    )
    speculative.rounds = rounds
    return speculative, autoregressive


def metric_of(samples: list[dict], sources: list[str]) -> SpeedMetrics:
    metric = SpeedMetrics(sources, max_depth=9)
    for sample in samples:
        metric.update(*traces(sample))
    return metric


def assert_same(actual, expected, name: str = ""):
    """Equal up to float64 rounding; None only equals None."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}/{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), name
        for place, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{name}/{place}")
    elif expected is None:
        assert actual is None, name
    else:
        assert actual == pytest.approx(expected, rel=1e-12), name


def assert_matches(actual: dict, expected: dict):
    assert_same(actual, {name: value for name, value in expected.items() if not name.startswith("not_tau")})


def sources_of(case: dict) -> list[str]:
    return ["never seen", *sorted({s["benchmark"] for s in case["samples"]})]


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = CASES[name]
    result = metric_of(case["samples"], sources_of(case)).compute()
    assert_matches(result["all"], case["expected"])
    assert result["per_source"].keys() == case["per_benchmark"].keys()
    for source, expected in case["per_benchmark"].items():
        assert_matches(result["per_source"][source], expected)
    assert_matches(result["macro"], case["macro"])


def test_sums_of_two_ranks_give_the_whole():
    case = CASES["basic"]
    sources = sources_of(case)
    whole = metric_of(case["samples"], sources)
    # What a sync of ranks does: every state is reduced on its own by its declared reduction. The third rank is idle.
    parts = [metric_of(part, sources) for part in (case["samples"][:3], case["samples"][3:], [])]
    synced = copy.deepcopy(parts[0])
    for state, reduce in synced._reductions.items():
        setattr(synced, state, reduce(torch.stack([getattr(part, state) for part in parts])))
    assert_same(synced.compute(), whole.compute())


def test_split_of_the_time():
    rounds = [Round(3, 2, 1, 2, draft_s=0.2, verify_s=0.3, total_s=0.6) for _ in range(2)]
    spec = GenerationTrace("k", "a", "fovea", 5, 0, list(range(5)), "cap", 0.5, 2.0, rounds, peak_memory_bytes=300)
    ar = GenerationTrace("k", "a", "ar", 5, 0, list(range(5)), "cap", 0.4, 4.0, peak_memory_bytes=200)
    other = GenerationTrace("k", "a", "transformers", 5, 0, list(range(5)), "cap", 0.4, 6.0)
    metric = SpeedMetrics(["a"], max_depth=2)
    metric.update(spec, ar, other)
    metric.update(spec, ar)
    numbers = metric.compute()["all"]
    assert numbers["time_share"] == pytest.approx({"prefill": 0.25, "draft": 0.2, "verify": 0.3, "rest": 0.25})
    assert numbers["round_ms"] == pytest.approx({"draft": 200, "verify": 300, "rest": 100})
    assert numbers["speedup_over_transformers"] == pytest.approx(3.0)
    assert numbers["speedup"] == pytest.approx(2.0)
    assert numbers["peak_memory_ratio"] == pytest.approx(1.5)
    assert numbers["extra_peak_gib"] == pytest.approx(100 / 2**30)


def test_every_number_has_a_definition():
    result = metric_of(CASES["basic"]["samples"], sources_of(CASES["basic"])).compute()
    assert {*result["all"], "macro"} == set(DEFINITIONS)
    assert all(value is None or isinstance(value, (int, float, list, dict)) for value in result["all"].values())


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_sample_at_all():
    result = SpeedMetrics(["a", "b"], max_depth=3).compute()
    assert result["per_source"] == {}
    assert result["macro"] == {"speedup": None, "tau": None}
    assert result["all"]["samples"] == 0
    assert result["all"]["speedup"] is None
    nothing = SpeedMetrics([], max_depth=3).compute()
    assert (nothing["all"]["samples"], nothing["all"]["peak_memory_ratio"]) == (0, None)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_long_counts_stay_exact():
    metric = SpeedMetrics(["a"], max_depth=1)
    metric.counts[0, 1:] = 2**53 + 1
    assert metric.counts.dtype == torch.int64
    metric.half()
    assert metric.seconds.dtype == torch.float64
    assert math.isclose(metric.compute()["all"]["tau"], 1.0)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_what_cannot_be_compared_is_refused():
    spec, ar = traces(CASES["by_hand"]["samples"][0])
    metric = SpeedMetrics(["x"], max_depth=7)
    ar.key = "other"
    with pytest.raises(ValueError, match="'h' and 'other'"):
        metric.update(spec, ar)
    ar.key = spec.key
    spec.source = "y"
    with pytest.raises(ValueError, match=r"unknown source 'y' .* \('x',\)"):
        metric.update(spec, ar)
    spec.source = "x"
    with pytest.raises(ValueError, match="depth 7, beyond max_depth 3"):
        SpeedMetrics(["x"], max_depth=3).update(spec, ar)
    assert metric.compute()["all"]["samples"] == 0


def test_throughput_where_answers_differ_in_length():
    """2 s for 10 tokens beside 6 s for 20, and 1 s for 4 beside 2 s for 4; the ids are not known."""
    metric = SpeedMetrics(["a"], max_depth=1)
    for key, spec, ar in (("x", (10, 2.0), (20, 6.0)), ("y", (4, 1.0), (4, 2.0))):
        pair = [GenerationTrace(key, "a", "m", 0, 0, total_s=s, counted=n) for n, s in (spec, ar)]
        metric.update(*pair)
    numbers = metric.compute()["all"]
    assert numbers["new_tokens"] == 14
    assert numbers["speedup"] == pytest.approx(8 / 3)
    assert numbers["throughput_ratio"] == pytest.approx((14 / 3) / (24 / 8))
    assert numbers["mean_of_sample_throughput_ratios"] == pytest.approx((5 / (20 / 6) + 4 / 2) / 2)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_an_answer_without_a_token_has_no_throughput():
    metric = SpeedMetrics(["a"], max_depth=1)
    metric.update(*[GenerationTrace("x", "a", "m", 0, 0, total_s=1.0, counted=0) for _ in range(2)])
    numbers = metric.compute()["all"]
    assert numbers["throughput_ratio"] is numbers["mean_of_sample_throughput_ratios"] is None
    assert numbers["speedup"] == 1.0
