"""A small target's numbers and head, and drafters whose weights are large enough for wrong positions to show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.targets.base import Prefill, RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.visual.retrieval import RetrievalConfig


@pytest.fixture
def spec() -> TargetSpec:
    return TargetSpec(
        architecture="qwen2_5_vl",
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=61,
        rms_norm_eps=1e-6,
        qkv_bias=True,
        rope=RopeSpec(10_000.0, (1, 1, 2)),
        max_positions=512,
        eos_ids=(2,),
        placeholder_ids=(60,),
    )


@pytest.fixture
def head(spec: TargetSpec) -> TargetHead:
    draw = torch.Generator().manual_seed(1)
    embedding = torch.randn(spec.vocab_size, spec.hidden_size, generator=draw)
    return TargetHead(embedding, embedding, 1 + 0.3 * torch.randn(spec.hidden_size, generator=draw))


@pytest.fixture
def make_drafter(spec: TargetSpec, head: TargetHead) -> Callable[..., FoveaDrafter]:
    """Drafters from changes of a small config, all weights of visible size."""

    def make(spec: TargetSpec = spec, seed: int = 0, **changes: Any) -> FoveaDrafter:
        torch.manual_seed(seed)
        settings = {
            "depth": 4,
            "correction_width": 16,
            "retrieval": RetrievalConfig(rho=0.6, k_min=2, k_max=8, k=3),
            **changes,
        }
        drafter = FoveaDrafter(spec, FoveaConfig(**settings), head)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name.endswith(("bias", "_gate", "shift.weight", "depth_embedding")):
                    parameter.normal_(std=0.5)
                elif name.endswith("qkv_proj.weight"):
                    parameter.mul_(2)
        return drafter.eval()

    return make


@pytest.fixture
def make_prefill(spec: TargetSpec, head: TargetHead) -> Callable[..., Prefill]:
    """A prompt of random states: text, two pictures (2 x 3 and 2 x 2 visual tokens), text; with M-RoPE positions."""

    def make(seed: int = 0, pictures: bool = True, capacity: int = 128, tail: int = 4) -> Prefill:
        draw = torch.Generator().manual_seed(seed)
        columns: list[list[int]] = []
        is_visual: list[bool] = []

        def text(count: int) -> None:
            start = max((max(c) for c in columns), default=-1) + 1
            columns.extend([start + i] * 3 for i in range(count))
            is_visual.extend([False] * count)

        def picture(height: int, width: int) -> None:
            start = max(max(c) for c in columns) + 1
            columns.extend([start, start + y, start + x] for y in range(height) for x in range(width))
            is_visual.extend([True] * (height * width))

        text(3)
        if pictures:
            picture(2, 3)
            text(1)
            picture(2, 2)
        text(tail)
        length = len(columns)
        visual = torch.randn(sum(is_visual), spec.hidden_size, generator=draw)
        ids = torch.randint(3, spec.vocab_size - 1, (length,), generator=draw)
        seen = torch.tensor(is_visual)
        ids[seen] = 60
        embeds = head.embed(ids).clone()
        embeds[seen] = visual
        return Prefill(
            ids=ids,
            positions=torch.tensor(columns).T,
            embeds=embeds,
            hidden=torch.randn(length, spec.hidden_size, generator=draw),
            visual=visual,
            is_visual=seen,
            capacity=capacity,
        )

    return make
