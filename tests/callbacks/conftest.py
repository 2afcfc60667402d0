"""What the small target teaches about its own answers, and a module that trains a drafter on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from fovea.drafters.checkpoint import Teaching
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.training.module import DrafterModule
from fovea.training.objective import ObjectiveConfig
from fovea.visual.retrieval import RetrievalConfig

MID_LAYERS = (1, 2)


@pytest.fixture(scope="session")
def taught(small_target, small_conversations) -> list[TeacherSample]:
    """Eight artifacts with greedy answers of the target itself."""
    answers = small_target.answer(small_conversations, max_new_tokens=8, batch_size=8)
    encoded = [small_target.encode(c, answers=a) for c, a in zip(small_conversations, answers, strict=True)]
    return [sample for one in encoded for sample in small_target.teach([one], MID_LAYERS)]


@pytest.fixture
def batches(taught) -> DataLoader:
    """Four batches of two."""
    return DataLoader(taught, batch_size=2, collate_fn=TeacherBatch.collate)


@pytest.fixture
def make_module(small_target) -> Callable[..., DrafterModule]:
    def make(seed: int = 0, **changes) -> DrafterModule:
        torch.manual_seed(seed)
        settings = {"depth": 2, "correction_width": 16, "retrieval": RetrievalConfig(k_min=2, k_max=4), **changes}
        return DrafterModule(
            FoveaDrafter(small_target.spec, FoveaConfig(**settings), small_target.head),
            ObjectiveConfig(),
            partial(torch.optim.AdamW, lr=1e-3),
            teaching=Teaching(MID_LAYERS, "small"),
        )

    return make
