"""Schedules against the golden rates, counter by counter and update by update."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fovea.training.schedules import deepspeed_log, linear, linear_factor, log_factor

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "schedules" / "schedules.json").read_text())


def rates(factory, peak: float, updates: int, **lengths) -> list[float]:
    """The rate that each optimizer update uses."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = factory(optimizer, **lengths)
    used = []
    for _ in range(updates):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("name", GOLDEN)
def test_factor_by_counter(name: str) -> None:
    case = GOLDEN[name]
    factor = {"linear": linear_factor, "log": log_factor}[case["kind"]]
    for row in case["by_counter"]:
        assert factor(row["counter"], case["warmup"], case["total"]) == pytest.approx(row["factor"], rel=1e-12, abs=0)


@pytest.mark.parametrize("name", [n for n in GOLDEN if GOLDEN[n]["total"] <= 1000])
def test_rate_of_every_golden_update(name: str) -> None:
    case = GOLDEN[name]
    factory, style = {
        "linear": (linear, "lr_lambda_style"),
        "log": (deepspeed_log, "lr_deepspeed_style"),
    }[case["kind"]]
    expected = {row["update"]: row[style] for row in case["by_optimizer_update"]}
    used = rates(factory, case["peak_lr"], max(expected), total_steps=case["total"], warmup_steps=case["warmup"])
    for update, rate in expected.items():
        assert used[update - 1] == pytest.approx(rate, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", [n for n in GOLDEN if GOLDEN[n]["kind"] == "log"])
def test_deepspeed_rates_through_the_lambda(name: str) -> None:
    case = GOLDEN[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=case["peak_lr"])
    scheduler = deepspeed_log(optimizer, total_steps=case["total"], warmup_steps=case["warmup"])
    for row in case["by_optimizer_update"]:
        rate = case["peak_lr"] * scheduler.lr_lambdas[0](row["update"] - 1)
        assert rate == pytest.approx(row["lr_deepspeed_style"], rel=1e-12, abs=0)


def test_ratio_is_a_share_of_the_total() -> None:
    by_ratio = rates(linear, 1.0, 40, total_steps=40, warmup_ratio=0.1)
    assert by_ratio == rates(linear, 1.0, 40, total_steps=40, warmup_steps=4)
    assert by_ratio.index(1.0) == 4


def test_rates_continue_after_a_restart() -> None:
    whole = rates(deepspeed_log, 1.0, 12, total_steps=12, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = deepspeed_log(optimizer, total_steps=12, warmup_steps=4)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    later = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    resumed = deepspeed_log(later, total_steps=12, warmup_steps=4)
    later.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for update in range(5, 12):
        assert later.param_groups[0]["lr"] == pytest.approx(whole[update])
        later.step()
        resumed.step()


@pytest.mark.parametrize("total", [-1, 0, math.inf])
def test_unknown_total_is_refused(total: float) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        rates(linear, 1.0, 1, total_steps=total, warmup_steps=0)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"warmup_steps": 11}, "10 optimizer steps"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_ratio": 1.5}, "warmup_ratio is 1.5"),
        ({}, "either"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "either"),
    ],
)
def test_bad_lengths_are_refused(lengths: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rates(deepspeed_log, 1.0, 1, total_steps=10, **lengths)
