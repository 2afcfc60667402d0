"""A run of two ranks that was cut short goes on on two, and on one, with what is left of its epoch."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp

from callbacks.drafter_checkpoint import DrafterCheckpoint
from datamodules.epochs import EpochLoader
from datamodules.loading import LoaderConfig, batches_done, epoch_sampler

SAMPLES, SIZE = 23, 2


class CutError(Exception):
    """Ends a run like a signal that no process survives."""


class Checkpoints(DrafterCheckpoint):
    def on_exception(self, *_) -> None:
        pass

    def _export(self, *_) -> None:
        """There is no drafter."""


class Samples(L.LightningDataModule):
    def train_dataloader(self) -> EpochLoader:
        data = torch.arange(float(SAMPLES))
        return EpochLoader(
            data,
            sampler=epoch_sampler(data, self.trainer, LoaderConfig(seed=4), shuffle=True),
            batches_done=lambda: batches_done(self.trainer),
            batch_size=SIZE,
        )


class Regression(L.LightningModule):
    """Weights that depend on every sample and on the order; writes down, per epoch, what it has seen."""

    def __init__(self, folder: Path, end: int | None = None) -> None:
        super().__init__()
        self.line, self.folder, self.end = torch.nn.Linear(1, 1), folder, end
        torch.nn.init.constant_(self.line.weight, 0.5)
        torch.nn.init.constant_(self.line.bias, 0.0)

    def training_step(self, batch, index):
        if self.trainer.global_step == self.end:
            raise CutError
        with (self.folder / f"rank{self.global_rank}.jsonl").open("a") as seen:
            seen.write(json.dumps([self.current_epoch, index, batch.tolist()]) + "\n")
        return (self.line(batch[:, None] / SAMPLES).sin() - batch[:, None] / 7).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder: Path, devices: int, end: int | None = None, resume: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Checkpoints(folder, every_n_steps=1)],
    )  # fmt: skip
    trainer.fit(Regression(folder, end), datamodule=Samples(), ckpt_path=resume, weights_only=True)


def work(rank: int, folder: Path, port: int) -> None:
    """What each of two ranks does; Lightning finds its place in the environment."""
    torch.set_num_threads(1)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ |= {name: str(value) for name, value in places.items()}
    fit(folder / "whole", 2)
    with pytest.raises(CutError):
        fit(folder / "cut", 2, end=10)  # six steps an epoch: the second was to make its fifth
    fit(folder / "two", 2, resume=folder / "cut" / DrafterCheckpoint.LAST)


def seen(folder: Path, rank: int) -> list:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def numbers(folder: Path, ranks: int, epoch: int) -> list[float]:
    return [n for rank in range(ranks) for at, _, batch in seen(folder, rank) if at == epoch for n in batch]


@pytest.mark.slow
def test_ranks_share_what_is_left(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(tmp_path, port), nprocs=2)
    last = tmp_path / "cut" / DrafterCheckpoint.LAST
    for rank in range(2):
        assert seen(tmp_path / "two", rank) == seen(tmp_path / "whole", rank)[10:]
    states = [torch.load(tmp_path / name / DrafterCheckpoint.LAST)["state_dict"] for name in ("whole", "two")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    fit(tmp_path / "one", 1, resume=last)
    done = numbers(tmp_path / "cut", 2, epoch=1)
    assert len(done) == 4 * 2 * SIZE
    assert sorted(done + numbers(tmp_path / "one", 1, epoch=1)) == list(range(SAMPLES))
    # Twelve batches an epoch: four are left, and are counted as its last ones.
    assert [index for epoch, index, _ in seen(tmp_path / "one", 0)] == [*range(8, 12), *range(12)]
    assert sorted(numbers(tmp_path / "one", 1, epoch=2)) == list(range(SAMPLES))
