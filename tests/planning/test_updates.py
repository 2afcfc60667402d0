"""Optimizer updates against the papers' counts and against Lightning's own."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fovea.planning.updates import Batching, count_updates


def count(samples, *, warmup_steps=0, warmup_ratio=None, **batching):
    return count_updates(samples, Batching(**batching), warmup_steps=warmup_steps, warmup_ratio=warmup_ratio)


def test_the_runs_of_the_fovea_paper():
    """Table 6: 43,260 updates, a tenth of them warm-up; 86,508 updates."""
    llava = count(57_671, warmup_ratio=0.1, per_device=2, accumulation=4, devices=2, epochs=12)
    assert (llava.total, llava.warmup) == (43_260, 4_326)
    qwen = count(57_671, warmup_steps=2_000, per_device=4, accumulation=1, devices=2, epochs=12)
    assert (qwen.total, qwen.warmup) == (86_508, 2_000)


@settings(deadline=None)
@given(
    samples=st.integers(1, 200), devices=st.integers(1, 5), per_device=st.integers(1, 7), accumulation=st.integers(1, 5)
)
def test_batches_of_a_device_are_those_of_its_loader(samples, devices, per_device, accumulation):
    sampler = DistributedSampler(range(samples), devices, 0)
    batches = len(DataLoader(range(samples), per_device, sampler=sampler))
    told = count(samples, per_device=per_device, accumulation=accumulation, devices=devices, epochs=3)
    assert told.per_epoch == -(-batches // accumulation)
    assert told.total == 3 * told.per_epoch


class Counted(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch.float().mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("per_device", "accumulation", "max_steps", "limit"),
    [(1, 1, -1, None), (3, 2, -1, None), (2, 3, -1, 5), (2, 2, -1, 0.5), (3, 1, 7, None), (3, 4, 0, None)],
)
def test_lightning_counts_alike(per_device, accumulation, max_steps, limit, tmp_path):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        max_steps=max_steps,
        accumulate_grad_batches=accumulation,
        limit_train_batches=limit,
        barebones=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(Counted(), DataLoader(range(11), per_device))
    told = count(
        11,
        per_device=per_device,
        accumulation=accumulation,
        devices=1,
        epochs=2,
        max_updates=max_steps,
        limit_batches=limit,
    )
    assert trainer.global_step == told.total
