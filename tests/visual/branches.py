"""The branches of SpecVLM's compressor, written out token by token."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from fovea.visual.compression import VisualCompressor


def by_hand(
    compressor: VisualCompressor, branch: str, x: Tensor, f: Tensor, draws: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and their states that ``branch`` makes of tokens ``x`` [N, D] and states ``f`` [N, D]."""
    config, count = compressor.config, len(x)
    if branch == "text_only":
        return [], []
    if branch == "resampler":
        return _resampled(compressor, x), [_mean(f, range(count))] * config.queries
    ratio = config.weight_ratio if config.mode == "weight" else getattr(config, f"{branch}_ratio")
    if branch == "prune":
        kept = sorted(torch.randperm(count, generator=draws)[: ceil(count / ratio)].tolist())
        return [x[i] for i in kept], [f[i] for i in kept]
    windows = [range(start, min(start + ratio, count)) for start in range(0, count, ratio)]
    states = [_mean(f, window) for window in windows]
    if branch == "pool":
        return [_mean(x, window) for window in windows], states
    assert compressor.conv is not None
    weight, bias = compressor.conv.conv.weight, compressor.conv.conv.bias
    rows = []
    for window in windows:
        row = bias
        for place, i in enumerate(window):
            row = row + weight[..., place] @ x[i]
        rows.append(row)
    return rows, states


def _mean(x: Tensor, window: range) -> Tensor:
    total = torch.zeros_like(x[0])
    for i in window:
        total = total + x[i]
    return total / len(window)


def _resampled(compressor: VisualCompressor, x: Tensor) -> list[Tensor]:
    r = compressor.resampler
    assert r is not None
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    keys, values = ((normed * r.norm.weight + r.norm.bias) @ r.kv_proj.weight.T).chunk(2, 1)
    rows = []
    for query in r.queries @ r.q_proj.weight.T:
        heads = []
        for start in range(0, len(query), r.head_dim):
            own = slice(start, start + r.head_dim)
            alpha = (keys[:, own] @ query[own] / r.head_dim**0.5).softmax(0)
            heads.append(alpha @ values[:, own])
        rows.append(r.out_proj.weight @ torch.cat(heads))
    return rows
