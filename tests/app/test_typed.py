"""Dataclasses out of plain settings: types arrive as meant, and errors name the field and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fovea.app.typed import SettingError, build


@dataclass(frozen=True)
class Inner:
    rho: float = 0.8
    mode: Literal["mass", "topk"] = "mass"

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho must lie in (0, 1], got {self.rho}")


@dataclass(frozen=True)
class Outer:
    blocks: int
    inner: Inner = field(default_factory=Inner)
    layers: tuple[int, ...] = (1, 2)
    folder: Path | None = None
    shared: bool = False
    weights: dict[str, float] = field(default_factory=dict)


def test_values_arrive_as_the_types_that_the_dataclass_names():
    built = build(
        Outer,
        {
            "blocks": 2,
            "inner": {"rho": 1, "mode": "topk"},
            "layers": [3],
            "folder": "a b",
            "shared": True,
            "weights": {"x": 1},
        },
        "drafter",
    )
    assert built == Outer(2, Inner(1.0, "topk"), (3,), Path("a b"), True, {"x": 1.0})
    assert isinstance(built.inner.rho, float)


@pytest.mark.parametrize(("word", "meant"), [("on", True), ("yes", True), ("off", False), ("No", False), (True, True)])
def test_words_for_true_and_false(word, meant):
    assert build(Outer, {"blocks": 2, "shared": word}, "drafter").shared is meant


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"blocks": 2, "blokcs": 3}, r"drafter has no field 'blokcs' \(did you mean 'blocks'\?\); choose from: blocks"),
        ({}, "drafter.blocks is not set"),
        ({"blocks": "08"}, "drafter.blocks must be a whole number, got '08'"),
        ({"blocks": 2.0}, "drafter.blocks must be a whole number, got 2.0"),
        ({"blocks": True}, "drafter.blocks must be a whole number, got True"),
        ({"blocks": None}, "drafter.blocks must be a whole number, got None"),
        ({"blocks": 2, "shared": "maybe"}, "drafter.shared must be true or false, got 'maybe'"),
        ({"blocks": 2, "layers": 3}, r"drafter.layers must be a list such as \[1,2\], got 3"),
        ({"blocks": 2, "layers": [1, "a"]}, r"drafter.layers\[1\] must be a whole number"),
        ({"blocks": 2, "inner": 3}, "drafter.inner must hold named fields"),
        ({"blocks": 2, "inner": {"mode": "mas"}}, "drafter.inner.mode is 'mas'; choose from: mass, topk"),
        ({"blocks": 2, "inner": {"rho": "x"}}, "drafter.inner.rho must be a number, got 'x'"),
        ({"blocks": 2, "inner": {"rho": 1.5}}, r"drafter.inner: rho must lie in \(0, 1\], got 1.5"),
        ({"blocks": 2, "weights": {"x": "y"}}, "drafter.weights.x must be a number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, message):
    with pytest.raises(SettingError, match=message):
        build(Outer, values, "drafter")
