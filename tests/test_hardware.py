"""What is done where a CPU has no unit for bfloat16."""

from __future__ import annotations

import logging

import pytest
import torch

from fovea import hardware
from fovea.app.devices import warn_of_emulation
from fovea.targets.tiny.training import half_precision

CPU = torch.device("cpu")


def cpu_with(monkeypatch: pytest.MonkeyPatch, **features: object) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)


@pytest.mark.parametrize(
    ("features", "has"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False, "cpu_name": "bf16"}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"sve_bf16": True}, True),
        ({}, False),
    ],
)
def test_a_unit_for_bfloat16_is_told_by_the_cpu(monkeypatch, features, has):
    cpu_with(monkeypatch, **features)
    assert hardware.multiplies_bfloat16(CPU) == has
    product = torch.ones(2, 2)
    with half_precision(CPU):
        assert (product @ product).dtype == (torch.bfloat16 if has else torch.float32)


def test_a_torch_that_lists_no_features_is_asked_for_two(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert hardware.multiplies_bfloat16(CPU)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not hardware.multiplies_bfloat16(CPU)


@pytest.mark.parametrize(
    ("dtype", "precision", "named"),
    [
        ("bfloat16", "bf16-mixed", "model.dtype=bfloat16 trainer.precision=bf16-mixed: "),
        ("float32", "bf16-true", "trainer.precision=bf16-true: "),
        ("bfloat16", "", "model.dtype=bfloat16: "),
        ("auto", "auto", None),
        ("float32", 32, None),
    ],
)
def test_asking_for_an_emulated_format_is_answered_with_the_faster_one(monkeypatch, caplog, dtype, precision, named):
    with caplog.at_level(logging.WARNING):
        cpu_with(monkeypatch, avx512_bf16=True)
        warn_of_emulation(dtype, precision, CPU)
        assert caplog.text == ""
        cpu_with(monkeypatch, avx512_bf16=False)
        warn_of_emulation(dtype, precision, CPU)
    assert (named is None) == (caplog.text == "")
    if named:
        assert named in caplog.text
        assert "trainer.precision=32-true" in caplog.text
