"""Muon in float32: torch's own orthogonalises in bfloat16, which a CPU without a unit for it multiplies very slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fovea.hardware import multiplies_bfloat16


def muon(matrices: Iterable[Tensor], *, lr: float, momentum: float, device: torch.device) -> torch.optim.Muon:
    """The optimizer for ``matrices`` [A, B] on ``device``: torch's, or else the same steps without its rounding."""
    kind = torch.optim.Muon if multiplies_bfloat16(device) else Float32Muon
    return kind(matrices, lr=lr, momentum=momentum, weight_decay=0.0)


class Float32Muon(torch.optim.Muon):
    """Muon as torch has it, with Nesterov momentum and without weight decay, all of it in the format of the weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)
        return loss

    def _update(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        gradient = cast(Tensor, matrix.grad)
        average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(gradient))
        average.lerp_(gradient, 1 - group["momentum"])
        direction = orthogonal(
            gradient.lerp(average, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rows, columns = matrix.shape
        matrix.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``matrix`` [A, B] with singular values near one, by ``steps`` of a Newton-Schulz iteration of fifth order."""
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
