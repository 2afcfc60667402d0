"""Retrieval against the golden vectors and against the formula written out row by row."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.visual.retrieval import RetrievalConfig, Retrieved, retrieve

GOLDEN = Path(__file__).parents[1] / "golden" / "retrieval"
CASES = json.loads((GOLDEN / "index.json").read_text())


def config_of(case: dict) -> RetrievalConfig:
    return RetrievalConfig(**{key: value for key, value in case.items() if key != "note"})


def ranked(scores: torch.Tensor, selected: torch.Tensor) -> list[list[int]]:
    """Selected indices by descending score, lower index first, computed with Python's sort."""
    return [
        sorted(np.flatnonzero(row).tolist(), key=lambda i, s=score: (-s[i], i))
        for row, score in zip(selected.numpy(), scores.tolist(), strict=True)
    ]


def naive(scores: list[float], config: RetrievalConfig) -> tuple[int, set[int]]:
    """min(K_raw, k_max) and the selected set of Eq. 6, one entry at a time, in float64."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    mass = [float(np.exp(scores[i] - scores[order[0]])) for i in order]
    total, running, k_raw = sum(np.exp(s - scores[order[0]]) for s in scores), 0.0, len(scores)
    for count, m in enumerate(mass, start=1):
        running += m
        if running >= config.rho * total:
            k_raw = count
            break
    k = min(len(scores), config.k_max, max(config.k_min, k_raw))
    return min(k_raw, config.k_max), set(order[:k])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_golden_vectors(name: str, dtype: torch.dtype) -> None:
    case = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / f"{name}.npz").items()}
    config = config_of(CASES[name])
    scores = case["scores"].to(dtype)
    if "q" in case:
        scores = case["q"].to(dtype) @ case["k"].to(dtype).T / 4
    rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-4, 1e-6)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)

    got = retrieve(scores, config, valid=case["valid"])

    cap = torch.full_like(case["K_raw"], config.k_max)
    assert torch.all((got.k >= case["K_lo"]) & (got.k <= case["K_hi"]))
    strict = case["K_strict"]
    assert torch.equal(got.k[strict], case["K"][strict])
    if config.follows_mass:
        assert torch.equal(got.k_raw[strict], torch.minimum(case["K_raw"], cap)[strict])
    rows = got.k == case["K"]
    assert torch.equal(got.selected[rows], case["selected"][rows])
    close(got.alpha[rows], case["alpha"].to(dtype)[rows])
    close((got.alpha @ case["u"].to(dtype))[rows], case["r"].to(dtype)[rows])
    want_ranked = [[i for i in row if i >= 0] for row in case["ranked_index"].tolist()]
    have_ranked = ranked(case["scores"], got.selected)
    assert [r for r, ok in zip(have_ranked, rows, strict=True) if ok] == [
        r for r, ok in zip(want_ranked, rows, strict=True) if ok
    ]


@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith("none_valid")])
def test_dropping_invalid_entries_changes_nothing(name: str) -> None:
    """The decoding path holds valid entries only and passes no mask; it must be the masked path's equal."""
    case = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / f"{name}.npz").items()}
    config, valid = config_of(CASES[name]), case["valid"].expand(case["scores"].shape)
    masked = retrieve(case["scores"], config, valid=valid)
    for row in valid.any(-1).nonzero()[:, 0].tolist():
        dense = retrieve(case["scores"][row : row + 1, valid[row]], config)
        assert dense.k.item() == masked.k[row].item()
        assert dense.k_raw.item() == masked.k_raw[row].item()
        assert torch.equal(dense.selected[0], masked.selected[row, valid[row]])
        torch.testing.assert_close(dense.alpha[0], masked.alpha[row, valid[row]])


@settings(max_examples=300, deadline=None)
@given(
    levels=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    step=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    rho=st.sampled_from([0.05, 0.25, 0.5, 0.62, 0.8, 0.95, 1.0]),
    k_min=st.integers(1, 12),
    extra=st.integers(0, 20),
)
def test_mass_rule_equals_the_naive_one(levels: list[int], step: float, rho: float, k_min: int, extra: int) -> None:
    """Coarse levels make ties and, with equal scores, exact boundaries common."""
    config = RetrievalConfig(rho=rho, k_min=k_min, k_max=k_min + extra)
    scores = torch.tensor([[level * step for level in levels]], dtype=torch.float64)
    k_raw, selection = naive(scores[0].tolist(), config)
    near = {naive(scores[0].tolist(), RetrievalConfig(rho=r, k_min=k_min, k_max=k_min + extra))[0] for r in around(rho)}
    got = retrieve(scores, config)
    # Where a rounding error of 1e-12 moves the boundary, either cardinality is right.
    assert got.k_raw.item() in {k_raw, *near}
    if len(near) == 1:
        assert set(np.flatnonzero(got.selected[0].numpy()).tolist()) == selection
        expected = torch.zeros_like(scores[0])
        expected[sorted(selection)] = scores[0, sorted(selection)].softmax(0)
        torch.testing.assert_close(got.alpha[0], expected)


def around(rho: float) -> tuple[float, ...]:
    return (rho * (1 - 1e-12), rho) if rho == 1 else (rho * (1 - 1e-12), rho * (1 + 1e-12))


def test_gradient_flows_through_the_weights_of_the_selection_only() -> None:
    scores = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    values = torch.randn(20, 4, dtype=torch.float64)
    config = RetrievalConfig(rho=0.5, k_min=2, k_max=8)
    got = retrieve(scores, config)
    (gradient,) = torch.autograd.grad((got.alpha @ values).sum(), scores)
    assert torch.all(gradient[~got.selected] == 0)
    assert torch.all(gradient[got.selected] != 0)


def test_garbage_in_invalid_entries_reaches_neither_value_nor_gradient() -> None:
    scores = torch.randn(3, 12, requires_grad=True)
    with torch.no_grad():
        scores[:, 7:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, torch.nan])
    valid = torch.arange(12) < 7
    got = retrieve(scores, RetrievalConfig(rho=0.8, k_min=1, k_max=4), valid=valid)
    (gradient,) = torch.autograd.grad((got.alpha * torch.randn(3, 12)).sum(), scores)
    assert not got.selected[:, 7:].any()
    assert torch.isfinite(got.alpha).all()
    assert torch.isfinite(gradient).all()


def test_rows_without_valid_entries_have_no_weight_and_no_nan() -> None:
    scores = torch.randn(2, 6, requires_grad=True)
    valid = torch.zeros(2, 6, dtype=torch.bool)
    valid[1, 3] = True
    got = retrieve(scores, RetrievalConfig(), valid=valid)
    (gradient,) = torch.autograd.grad(got.alpha.sum(), scores)
    assert got.k.tolist() == [0, 1]
    assert got.alpha.tolist() == [[0] * 6, [0, 0, 0, 1, 0, 0]]
    assert torch.isfinite(gradient).all()


def test_another_ranking_selects_but_scores_weigh() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    ranking = torch.tensor([[0.0, 5.0, 5.0, 5.0]])
    got: Retrieved = retrieve(scores, RetrievalConfig(mode="static_image", k=2), ranking=ranking)
    assert got.selected.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(got.alpha[0, 1:3], torch.tensor([2.0, 1.0]).softmax(0))
    by_mass = RetrievalConfig(mode="random", cardinality="mass", rho=0.9, k_min=1, k_max=4)
    assert retrieve(scores, by_mass, ranking=ranking).k.tolist() == [3]


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"rho": 0.0}, "rho"),
        ({"rho": 1.01}, "rho"),
        ({"k_min": 9, "k_max": 8}, "k_min 9"),
        ({"k_min": 0}, "k_min"),
        ({"k": 0}, "retrieval.k is 0"),
        ({"mode": "nearest"}, "once_per_block"),
        ({"cardinality": "some"}, "fixed"),
    ],
)
def test_bad_settings_are_refused_by_name(settings_: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RetrievalConfig(**settings_)
