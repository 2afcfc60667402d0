"""A small drafter beside a random head, and artifacts whose states give the answers, as a target's would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherSample, supervised_positions
from fovea.visual.retrieval import RetrievalConfig

SPEC = TargetSpec(
    architecture="qwen2_5_vl",
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=41,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    rope=RopeSpec(10_000.0, (1, 1, 2)),
    max_positions=512,
    eos_ids=(2,),
    placeholder_ids=(40,),
)
GRID = (2, 3)


def make_head() -> TargetHead:
    draw = torch.Generator().manual_seed(1)
    embedding, lm_head = torch.randn(2, SPEC.vocab_size, SPEC.hidden_size, generator=draw)
    return TargetHead(embedding, lm_head, 1 + 0.3 * torch.randn(SPEC.hidden_size, generator=draw))


@pytest.fixture
def head() -> TargetHead:
    return make_head()


def drafter_maker(head: TargetHead) -> Callable[..., FoveaDrafter]:
    def make(seed: int = 0, **changes: Any) -> FoveaDrafter:
        torch.manual_seed(seed)
        rule = RetrievalConfig(rho=0.6, k_min=2, k_max=4)
        settings = {"depth": 3, "correction_width": 16, "retrieval": rule, **changes}
        return FoveaDrafter(SPEC, FoveaConfig(**settings), head)

    return make


@pytest.fixture
def make_drafter(head: TargetHead) -> Callable[..., FoveaDrafter]:
    return drafter_maker(head)


def sample_maker(head: TargetHead) -> Callable[..., TeacherSample]:
    """``make(seed, "tptaat")``: t a text token, a an answer token, p a picture of 2 x 3 visual tokens."""

    def make(seed: int, parts: str) -> TeacherSample:
        draw = torch.Generator().manual_seed(seed)
        columns: list[list[int]] = []
        answer: list[bool] = []
        visual: list[bool] = []
        for part in parts:
            start = max((max(column) for column in columns), default=-1) + 1
            if part == "p":
                cells = [[start, start + y, start + x] for y in range(GRID[0]) for x in range(GRID[1])]
                columns += cells
            else:
                cells = [[start] * 3]
                columns += cells
            answer += [part == "a"] * len(cells)
            visual += [part == "p"] * len(cells)
        answer_mask, is_visual = torch.tensor(answer), torch.tensor(visual)
        ids = torch.randint(3, 40, (len(columns),), generator=draw).masked_fill(is_visual, 40)

        def noise(rows: int) -> torch.Tensor:
            return torch.randn(rows, SPEC.hidden_size, generator=draw)

        return TeacherSample(
            key=f"sample {seed}",
            ids=ids,
            positions=torch.tensor(columns).T,
            answer_mask=answer_mask,
            is_visual=is_visual,
            last=head.lm_head_weight[ids.roll(-1)] + 0.1 * noise(len(columns)),
            mid=noise(int(supervised_positions(answer_mask).sum())),
            visual=noise(int(is_visual.sum())),
            grids=(GRID,) * parts.count("p"),
        )

    return make


@pytest.fixture
def make_sample(head: TargetHead) -> Callable[..., TeacherSample]:
    return sample_maker(head)


@pytest.fixture
def samples(make_sample: Callable[..., TeacherSample]) -> list[TeacherSample]:
    """Eight samples of different lengths: one picture, two, none, two answers."""
    shapes = [
        "tptaaaaaat",
        "ttaaaat",
        "tpptaaaaaaaat",
        "tptaaattaaaaat",
        "taaaaaa",
        "ptaaat",
        "ttptaaaaa",
        "tppaaaattaaa",
    ]
    return [make_sample(seed, parts) for seed, parts in enumerate(shapes)]
