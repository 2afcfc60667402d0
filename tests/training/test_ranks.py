"""One step, however it is shared: over micro-batches, over ranks, and where ranks hold parts of the drafter."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from callbacks.checkpoint_files import CheckpointFiles
from callbacks.drafter_checkpoint import DrafterCheckpoint
from fovea.drafters.checkpoint import load_drafter
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.module import DrafterModule
from fovea.training.objective import ObjectiveConfig
from fovea.training.sharding import ShardedStrategy
from tests.training.conftest import SPEC, drafter_maker, make_head, sample_maker

#: Answers of 0 to 27 tokens: of the first step's eight samples, rank 0 has 4 supervised tokens and rank 1 has 71.
SHAPES = [
    *("ta", "tp" + 27 * "a", "tpta", "tt" + 22 * "a", "ttta", "tppt" + 9 * "a", "tata", "tpt" + 17 * "a"),
    *("tptaaat", "tpttt", "taaaataa", "tpttt", "tppaaat", "tttt", "tpaaaaaa", "ttt"),
    *("tta", "tptaaaaa", "tttaa", "tptaaaaaaat", "tptaa", "taaaaa", "ttptaaaa", "taaaattaaa"),
]
STEPS = 2 * 3
ADAMW = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95))
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def falling(optimizer: torch.optim.Optimizer, *, total_steps: float) -> LambdaLR:
    """A rate that falls with every optimizer step, whatever the length of the training."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))


class Data(L.LightningDataModule):
    """Every rank takes every ``world_size``-th sample, in order."""

    def __init__(self, samples, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def _loader(self) -> DataLoader:
        mine = self.samples[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(mine, batch_size=self.batch_size, collate_fn=TeacherBatch.collate)

    train_dataloader = val_dataloader = _loader


class Losses(L.Callback):
    """The loss of every optimizer step, over all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, *_) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def fit(folder: Path, drafter, samples, *, batch_size: int = 4, optimizer=SGD, resume=None, epochs=2, **settings):
    """Trains ``drafter`` for so many epochs; what it leaves in ``folder``: losses, weights, checkpoint and export."""
    torch.manual_seed(0)
    losses = Losses()
    module = DrafterModule(drafter, ObjectiveConfig(), optimizer, falling)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=epochs,
        num_sanity_val_steps=0, use_distributed_sampler=False, plugins=[CheckpointFiles()],
        callbacks=[losses, DrafterCheckpoint(folder)],
        **{"devices": 1, "gradient_clip_val": 0.5, **settings},
    )  # fmt: skip
    trainer.fit(module, Data(samples, batch_size), ckpt_path=resume, weights_only=True)
    if trainer.is_global_zero:
        torch.save({"losses": losses.losses, "val": float(trainer.callback_metrics["val/loss"])}, folder / "losses")


def outcome(folder: Path, drafter) -> tuple[dict[str, Any], torch.Tensor]:
    """Losses of a fit and the drafter that it has exported."""
    loaded = load_drafter(folder / "drafter", drafter.head, SPEC)
    return torch.load(folder / "losses"), torch.cat([p.detach().flatten() for p in loaded.parameters()])


def work(rank: int, port: int, folder: Path, drafter, samples, cases: dict[str, dict[str, Any]]) -> None:
    """What each of two ranks does; Lightning finds its place in the environment."""
    torch.set_num_threads(1)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ |= {name: str(value) for name, value in places.items()}
    initial = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    for name, case in cases.items():
        own = type(drafter)(SPEC, drafter.config, drafter.head)
        own.load_state_dict(initial)
        strategy = case.pop("strategy", "ddp")
        made = ShardedStrategy(**strategy) if isinstance(strategy, dict) else strategy
        resume = folder / case.pop("resume") / DrafterCheckpoint.LAST if "resume" in case else None
        fit(folder / name, own, samples, devices=2, strategy=made, resume=resume, **case)


#: One of the half-trained runs is taken up again by both strategies.
ON_TWO: dict[str, dict[str, Any]] = {
    "clipped": {},
    "accumulated": {"batch_size": 2, "accumulate_grad_batches": 2, "gradient_clip_val": None},
    "bf16": {"precision": "bf16-mixed"},
    "sharded_accumulated": {
        "strategy": {"reshard_after_forward": False},
        **{"batch_size": 2, "accumulate_grad_batches": 2, "gradient_clip_val": None},
    },
    "sharded_half": {"strategy": {}, "optimizer": ADAMW, "epochs": 1},
    "sharded_resumed": {"strategy": {}, "optimizer": ADAMW, "resume": "sharded_half"},
    "resumed": {"optimizer": ADAMW, "resume": "sharded_half"},
}


@pytest.fixture(scope="module")
def began():
    """The drafter that every run begins with, and the samples."""
    shared = make_head()
    drafter = drafter_maker(shared)(depth=3)
    return drafter, [sample_maker(shared)(seed, parts) for seed, parts in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def two(began, tmp_path_factory) -> Callable[[str], tuple[dict[str, Any], torch.Tensor]]:
    """Outcomes of the runs on two ranks, by name."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port, folder, *began, ON_TWO), nprocs=2)
    return lambda name: outcome(folder / name, began[0])


@pytest.fixture(scope="module")
def one(began, tmp_path_factory) -> Callable[..., tuple[dict[str, Any], torch.Tensor]]:
    """The outcome of a run on one rank whose batches are whole."""

    @cache
    def run(optimizer=SGD, precision: str = "32-true", clip: float | None = 0.5):
        folder = tmp_path_factory.mktemp("one")
        settings = {"optimizer": optimizer, "precision": precision, "gradient_clip_val": clip}
        fit(folder, deepcopy(began[0]), began[1], batch_size=8, **settings)
        return outcome(folder, began[0])

    return run


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["clipped", "accumulated", "sharded_accumulated"])
def test_ranks_and_micro_batches_make_the_steps_of_one(one, two, began, name) -> None:
    (alone, whole), (together, parts) = one(clip=0.5 if name == "clipped" else None), two(name)
    moved = (whole - torch.cat([p.detach().flatten() for p in began[0].parameters()])).abs().max()
    assert moved > 0.01
    assert len(alone["losses"]) == len(together["losses"]) == STEPS
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert together["val"] == pytest.approx(alone["val"], rel=1e-5)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_in_half_precision_they_differ_by_its_rounding_alone(one, two, began) -> None:
    """Products are rounded to 8 bits, and sums over other rows differently: a hundredth of what the weights have moved,
    more or less, as units for them (or none) go about it."""
    (alone, whole), (together, parts) = one(precision="bf16-mixed"), two("bf16")
    moved = whole - torch.cat([p.detach().flatten() for p in began[0].parameters()])
    assert together["losses"] == pytest.approx(alone["losses"], rel=0.01)
    assert (parts - whole).norm() < 0.02 * moved.norm()


def test_a_sharded_run_leaves_what_any_strategy_resumes(one, two) -> None:
    """Its checkpoint is one file of whole weights and moments: the run goes on with FSDP2, and with DDP."""
    alone, whole = one(ADAMW)
    first = two("sharded_half")[0]["losses"]
    for name in ("sharded_resumed", "resumed"):
        second, weights = two(name)
        assert first + second["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        torch.testing.assert_close(weights, whole, rtol=0, atol=2e-6)
