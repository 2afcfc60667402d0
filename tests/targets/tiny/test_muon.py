"""Muon without bfloat16 against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fovea import hardware
from fovea.targets.tiny.muon import Float32Muon, muon, orthogonal

SHAPES = [(24, 24), (16, 48), (48, 16)]
CPU = torch.device("cpu")


def test_it_follows_torchs_within_the_rounding_of_bfloat16():
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    mine, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    optimizers = [
        kind(matrices, lr=0.05, momentum=0.9, weight_decay=0.0)
        for kind, matrices in ((Float32Muon, mine), (torch.optim.Muon, theirs))
    ]
    for _ in range(4):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for optimizer, matrices in zip(optimizers, (mine, theirs), strict=True):
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient.clone()
            optimizer.step()
    for ours, reference, before in zip(mine, theirs, start, strict=True):
        moved = (reference - before).norm()
        assert moved > 0.5
        assert (ours - reference).norm() < 0.03 * moved, "the steps differ by bfloat16's rounding"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_step_is_along_the_singular_vectors(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonal(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7) @ right.T
    values = inner.diagonal()
    assert torch.allclose(inner, values.diag(), atol=1e-9)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_matrix_without_a_gradient_stays_and_the_loss_is_returned():
    idle, busy = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Float32Muon([idle, busy], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        loss = (busy * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 11
    assert torch.equal(idle, torch.ones(2, 2))
    assert not torch.equal(busy, torch.ones(2, 2))


@pytest.mark.parametrize("has", [True, False])
def test_torchs_own_is_taken_where_bfloat16_is_fast(monkeypatch, has):
    monkeypatch.setattr(hardware, "_cpu_features", lambda: {"avx512_bf16": has})
    made = muon([nn.Parameter(torch.ones(2, 2))], lr=0.1, momentum=0.95, device=CPU)
    assert type(made) is (torch.optim.Muon if has else Float32Muon)
