"""A training that was cut short goes on as if it had not been: the same samples, losses and weights, bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from callbacks.drafter_checkpoint import DrafterCheckpoint
from callbacks.gates import Gates
from callbacks.throughput import Throughput
from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import JsonlConversations
from datamodules.curriculum import Curriculum
from datamodules.epochs import EpochLoader
from datamodules.loading import LoaderConfig
from datamodules.online import OnlineDataModule
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.teaching import ConversationTeacher
from fovea.drafters.checkpoint import Teaching
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.training.module import DrafterModule, UnrollConfig
from fovea.training.objective import ObjectiveConfig
from fovea.visual.retrieval import RetrievalConfig

EXPORT = ExportConfig(mid_layers=(1, 2), dtype="fp32", answers="dataset", shard_bytes=60_000)
SAMPLES = 11


class Killed(BaseException):
    """Stands for a signal that no process survives: nothing is saved when it comes."""


class Checkpoints(DrafterCheckpoint):
    def on_exception(self, trainer, pl_module, exception) -> None:
        if not isinstance(exception, Killed):
            super().on_exception(trainer, pl_module, exception)


class Watch(L.Callback):
    """Notes what is trained on, and ends the run before a micro-batch, or while weights change."""

    def __init__(self, end: tuple[str, int, BaseException] | None = None) -> None:
        self.end = end
        self.keys: list[tuple[int, tuple[str, ...]]] = []
        self.losses: dict[int, float] = {}
        self.validated: list[int] = []

    def _maybe(self, where: str, count: int) -> None:
        if self.end is not None and self.end[:2] == (where, count):
            raise self.end[2]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._maybe("batch", len(self.keys))
        self.keys.append((trainer.current_epoch, batch.keys))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self._maybe("step", trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if "train/loss" in trainer.callback_metrics:
            self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])

    def on_validation_start(self, trainer, pl_module) -> None:
        self._maybe("validation", trainer.global_step)
        self.validated.append(trainer.global_step)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> JsonlConversations:
    """Eleven conversations, every second with a picture."""
    folder = tmp_path_factory.mktemp("conversations")
    with (folder / "c.jsonl").open("w") as file:
        for i in range(SAMPLES):
            question, images = f"what is {i}?", [f"{i}.png"] if i % 2 else []
            if images:
                Image.new("RGB", (84, 84), (20 * i, 90, 160)).save(folder / images[0])
            content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "the red one " * 2}]
            file.write(json.dumps({"key": f"k{i}", "messages": messages, "images": images}) + "\n")
    return JsonlConversations(folder / "c.jsonl")


@pytest.fixture(scope="module")
def train(small_target, small_target_path, source, tmp_path_factory):
    """Trains, from a checkpoint if there is one, and gives the module, what was seen and the steps that were logged."""
    root = tmp_path_factory.mktemp("artifacts")

    def run(
        folder,
        *,
        end=None,
        resume=None,
        online=False,
        streamed=False,
        workers=0,
        threads=0,
        curriculum=None,
        data=source,
        **settings,
    ):
        loader = LoaderConfig(
            batch_size=2,
            num_workers=workers,
            threads=threads,
            val_fraction=0.0,
            seed=3,
            curriculum=curriculum and Curriculum(0.3),
        )
        given = {"load_target": lambda: small_target, "export": EXPORT, "train": data, "loader": loader}
        if online:
            module_of_data = OnlineDataModule(val=data, **given)
        else:
            module_of_data = ArtifactDataModule(
                checkpoint=small_target_path, root=root, val=data, progress=False, **given
            )
            if streamed:
                module_of_data.prepare_data()
                module_of_data.train_source = f"pipe:cat {module_of_data.folder_of(data)}/{{name}}"
        torch.manual_seed(0 if resume is None else 5)
        config = FoveaConfig(num_blocks=1, depth=2, correction_width=16, retrieval=RetrievalConfig(k_min=2, k_max=4))
        module = DrafterModule(
            FoveaDrafter(small_target.spec, config, small_target.head),
            ObjectiveConfig(),
            partial(torch.optim.AdamW, lr=1e-3),
            lambda optimizer, total_steps: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20),
            UnrollConfig(max_anchors=5, seed=9),
            Teaching((1, 2), "t"),
        )
        watch, logger = Watch(end), CSVLogger(folder, version=f"from-{resume.name if resume else 'nothing'}")
        often = {
            "every_n_steps": settings.pop("every_n_steps", 2),
            "every_minutes": settings.pop("every_minutes", None),
        }
        keep = Checkpoints(folder, **often)
        trainer = L.Trainer(
            callbacks=[Gates("dataset", samples=2), Throughput(), watch, keep], logger=logger, log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, accelerator="cpu",
            **{"max_epochs": 3} | settings,
        )  # fmt: skip
        try:
            trainer.fit(module, module_of_data, ckpt_path=resume, weights_only=True)
        except (Killed, SystemExit):
            trainer = None
        rows = Path(logger.log_dir, "metrics.csv")
        lines = rows.read_text().splitlines() if rows.is_file() else [""]
        column = lines[0].split(",").index("step") if "step" in lines[0] else 0
        place = lines[0].split(",").index("train/loss") if "train/loss" in lines[0] else -1
        logged = [int(line.split(",")[column]) for line in lines[1:] if place >= 0 and line.split(",")[place]]
        return module, watch, logged, trainer

    return run


def weights(module: DrafterModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.drafter.parameters()])


LAST = DrafterCheckpoint.LAST


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({}, ("batch", 3, Killed())),
        ({"every_n_steps": 1, "workers": 2}, ("batch", 8, Killed())),
        ({"every_n_steps": 1, "threads": 3}, ("batch", 8, Killed())),
        ({"every_n_steps": 1}, ("step", 13, Killed())),
        ({"every_n_steps": 5}, ("validation", 12, Killed())),
        ({"workers": 2}, ("batch", 6, Killed())),  # at the border of two epochs
        ({"every_n_steps": 1, "accumulate_grad_batches": 4}, ("batch", 11, Killed())),
        ({"every_n_steps": None, "accumulate_grad_batches": 4}, ("batch", 11, KeyboardInterrupt())),
        ({"every_n_steps": None}, ("batch", 8, KeyboardInterrupt())),
        ({"every_n_steps": None}, ("batch", 6, KeyboardInterrupt())),
        ({"every_n_steps": 1}, ("batch", 12, Killed())),
        ({"every_n_steps": 3}, ("step", 8, KeyboardInterrupt())),
        ({"every_n_steps": None}, ("validation", 6, KeyboardInterrupt())),
        ({"max_epochs": -1, "max_steps": 15}, ("batch", 9, Killed())),
        ({"max_epochs": -1, "max_steps": 15}, ("batch", 6, Killed())),
        ({"every_n_steps": 1, "curriculum": True}, ("batch", 9, Killed())),
        ({"every_n_steps": 1, "online": True}, ("batch", 9, Killed())),
        ({"every_n_steps": 1, "limit_train_batches": 4}, ("batch", 6, Killed())),
        ({"every_n_steps": 1, "streamed": True}, ("batch", 9, Killed())),
        ({"every_n_steps": 1, "streamed": True, "workers": 2}, ("batch", 8, Killed())),
        ({"streamed": True, "max_epochs": -1, "max_steps": 15}, ("batch", 6, Killed())),
    ],
    ids=str,
)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(train, tmp_path, settings, cut) -> None:
    whole, seen, logged, trainer = train(tmp_path / "whole", **settings)
    assert len(seen.keys) > cut[1]
    train(tmp_path / "cut", end=cut, **settings)
    step = torch.load(tmp_path / "cut" / LAST, weights_only=True)["global_step"]
    resumed, again, logged_again, trainer_again = train(tmp_path / "on", resume=tmp_path / "cut" / LAST, **settings)
    assert again.keys == seen.keys[len(seen.keys) - len(again.keys) :]
    assert again.losses.items() <= seen.losses.items()
    assert set(again.losses) == {s for s in seen.losses if s > step}
    assert torch.equal(weights(whole), weights(resumed))
    assert trainer_again.global_step == trainer.global_step
    assert trainer_again.current_epoch == trainer.current_epoch
    assert logged_again == logged[len(logged) - len(logged_again) :]
    assert seen.validated[len(seen.validated) - len(again.validated) :] == again.validated


@pytest.mark.parametrize("steps", [8, 12])
def test_a_training_can_be_made_longer(train, tmp_path, steps) -> None:
    """Also one that its last step ended within an epoch."""
    whole, seen, _, _ = train(tmp_path / "whole", max_epochs=-1, max_steps=15)
    train(tmp_path / "short", max_epochs=-1, max_steps=steps)
    longer, again, _, _ = train(tmp_path / "long", resume=tmp_path / "short" / LAST, max_epochs=-1, max_steps=15)
    assert again.keys == seen.keys[steps:]
    assert torch.equal(weights(whole), weights(longer))


def test_an_interrupted_run_can_be_interrupted_again(train, tmp_path) -> None:
    whole, seen, _, _ = train(tmp_path / "whole", accumulate_grad_batches=2)
    keys, folder = [], None
    for number, batch in enumerate((5, 3, 5)):
        cut = {"end": ("batch", batch, KeyboardInterrupt()), "resume": folder, "accumulate_grad_batches": 2}
        _, watch, _, _ = train(tmp_path / str(number), every_n_steps=None, **cut)
        folder = tmp_path / str(number) / LAST
        keys += watch.keys[: batch - 1]  # the last one was being added up
    last, watch, _, _ = train(tmp_path / "last", resume=folder, accumulate_grad_batches=2)
    assert keys + watch.keys == seen.keys
    assert torch.equal(weights(whole), weights(last))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_batches_of_another_size_take_the_rest_of_the_epoch(train, tmp_path, size, monkeypatch) -> None:
    _, first, _, _ = train(tmp_path / "cut", end=("batch", 9, Killed()), every_n_steps=3)
    done = [key for epoch, keys in first.keys for key in keys if epoch == 1][:6]
    monkeypatch.setattr(
        "datamodules.artifacts.EpochLoader",
        lambda *args, batch_size, **more: EpochLoader(*args, batch_size=size, **more),
    )
    _, again, _, trainer = train(tmp_path / "on", resume=tmp_path / "cut" / LAST)
    rest = [key for epoch, keys in again.keys for key in keys if epoch == 1]
    assert sorted(done + rest) == sorted(f"k{i}" for i in range(SAMPLES))
    assert [len(keys) for epoch, keys in again.keys if epoch == 1][:-1] == [size] * (-(-5 // size) - 1)
    assert sorted(key for epoch, keys in again.keys for key in keys if epoch == 2) == sorted(done + rest)
    assert trainer.current_epoch == 3
    assert again.validated[0] == 9 + -(-5 // size)


def test_a_stream_that_is_dealt_otherwise_goes_on_and_says_so(train, tmp_path, caplog) -> None:
    train(tmp_path / "cut", end=("batch", 4, Killed()), streamed=True)
    _, again, _, trainer = train(tmp_path / "on", resume=tmp_path / "cut" / LAST, streamed=True, workers=2)
    assert "workers was 0 and is 2" in caplog.text
    assert sum(epoch == 0 for epoch, _ in again.keys) == trainer.num_training_batches - 4
    assert {key for epoch, keys in again.keys for key in keys if epoch == 1} == {f"k{i}" for i in range(SAMPLES)}


def test_what_cannot_be_used_is_replaced_alike(train, tmp_path, source, monkeypatch) -> None:
    """The live target: a whole batch without a sample behind the place where the run is resumed."""
    settings = {"online": True, "every_n_steps": 1}
    _, seen, _, _ = train(tmp_path / "sound", **settings)
    broken = {key for _, keys in seen.keys[2:4] for key in keys}
    teach = ConversationTeacher.teach
    monkeypatch.setattr(
        ConversationTeacher, "teach", lambda self, batch: teach(self, [c for c in batch if c.key not in broken])
    )
    whole, seen, _, _ = train(tmp_path / "whole", **settings)
    assert seen.keys[1] == seen.keys[2] == seen.keys[3]
    train(tmp_path / "cut", end=("batch", 3, Killed()), **settings)
    resumed, again, _, _ = train(tmp_path / "on", resume=tmp_path / "cut" / LAST, **settings)
    assert again.keys == seen.keys[3:]
    assert torch.equal(weights(whole), weights(resumed))


def test_other_data_within_an_epoch_are_refused(train, tmp_path, source) -> None:
    train(tmp_path / "cut", end=("batch", 3, Killed()))
    fewer = JsonlConversations(source.path, limit=9)
    with pytest.raises(ArtifactError, match="within an epoch of 11 samples, and there are 9 now; resume it with"):
        train(tmp_path / "on", resume=tmp_path / "cut" / LAST, data=fewer)


def test_a_resumed_run_has_the_best_drafter_of_the_one_before(train, tmp_path) -> None:
    train(tmp_path / "cut", end=("batch", 9, Killed()))
    best = (tmp_path / "cut" / "drafter_best" / "model.safetensors").read_bytes()
    train(tmp_path / "on", resume=tmp_path / "cut" / LAST, end=("batch", 1, Killed()))
    assert (tmp_path / "on" / "drafter_best" / "model.safetensors").read_bytes() == best


def test_what_is_saved_every_so_many_minutes(train, tmp_path, monkeypatch) -> None:
    """The clock goes on by a minute whenever it is looked at."""
    minutes = iter(range(1000))
    monkeypatch.setattr("callbacks.drafter_checkpoint.time.monotonic", lambda: 60.0 * next(minutes))
    train(tmp_path, end=("batch", 5, Killed()), every_n_steps=None, every_minutes=3)
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 3


def test_a_process_that_dies_while_it_writes_leaves_the_checkpoint_before(train, tmp_path, monkeypatch) -> None:
    save = L.Trainer.save_checkpoint

    def cut(trainer, path, *args, **more) -> None:
        save(trainer, path, *args, **more)
        if trainer.global_step == 4:
            Path(path).write_bytes(Path(path).read_bytes()[:1000])
            raise Killed

    monkeypatch.setattr(L.Trainer, "save_checkpoint", cut)
    train(tmp_path)
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 2


def test_a_few_batches_can_be_overfitted(train, tmp_path) -> None:
    _, watch, _, _ = train(tmp_path, overfit_batches=2, max_epochs=2)
    assert [keys for _, keys in watch.keys] == [("k0", "k1"), ("k10", "k2")] * 2
