"""The live target teaches the same as artifacts do, in the same order, and in the same training."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from PIL import Image

from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import JsonlConversations
from datamodules.loading import LoaderConfig
from datamodules.online import OnlineDataModule
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.drafters.checkpoint import Teaching
from fovea.drafters.registry import drafter_type
from fovea.targets.load import load_target
from fovea.training.module import DrafterModule
from fovea.training.objective import ObjectiveConfig
from fovea.visual.retrieval import RetrievalConfig


@pytest.fixture
def source(tmp_path):
    """Eight conversations: pictures of several sizes, text alone, two questions."""
    path = tmp_path / "c.jsonl"
    with path.open("w") as file:
        for i in range(8):
            messages = [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "the red one"}]
            if i % 2:
                Image.new("RGB", (84 + 28 * (i % 3), 84), (30 * i, 90, 160)).save(tmp_path / f"{i}.png")
                messages[0]["content"] = [{"type": "image"}, {"type": "text", "text": f"what is {i}?"}]
            if i % 3 == 0:
                messages += [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "a blue one"}]
            images = [f"{i}.png"] if i % 2 else []
            file.write(json.dumps({"key": f"k{i}", "messages": messages, "images": images}) + "\n")
    return path


def modules(tmp_path, small_target, small_target_path, source, answers="dataset", **loader):
    export = ExportConfig(mid_layers=(1, 2), feature_layers=(1, 2), dtype="fp32", answers=answers, max_new_tokens=6)
    settings = LoaderConfig(**{"batch_size": 2, "val_fraction": 0.0} | loader)
    conversations = JsonlConversations(source)
    offline = ArtifactDataModule(
        checkpoint=small_target_path,
        export=export,
        load_target=lambda: small_target,
        train=conversations,
        root=tmp_path / "artifacts",
        loader=settings,
        progress=False,
    )
    online = OnlineDataModule(load_target=lambda: small_target, export=export, train=conversations, loader=settings)
    offline.prepare_data()
    for data in (offline, online):
        data.setup()
    return offline, online


def test_an_empty_file_is_named_before_the_target_is_loaded(tmp_path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    train = JsonlConversations(empty)
    load = partial(pytest.fail, "the target was loaded")
    data = OnlineDataModule(load_target=load, export=ExportConfig(mid_layers=(1, 2)), train=train)
    with pytest.raises(ArtifactError, match=rf"there is no conversation in {empty}; is a file empty"):
        data.setup()


@pytest.mark.parametrize("answers", ["dataset", "target"])
def test_batches_equal_those_of_artifacts(tmp_path, small_target, small_target_path, source, answers) -> None:
    offline, online = modules(tmp_path, small_target, small_target_path, source, answers)
    for _ in range(2):  # the second epoch takes remembered answers
        for stored, live in zip(offline.train_dataloader(), online.train_dataloader(), strict=True):
            assert stored.keys == live.keys
            for name, part in vars(stored).items():
                if isinstance(part, torch.Tensor):
                    torch.testing.assert_close(getattr(live, name), part, rtol=1e-5, atol=1e-5)


SETTINGS: dict[str, dict] = {
    "fovea": {"correction_width": 16, "retrieval": RetrievalConfig(rho=0.6, k_min=2, k_max=4)},
    "eaglevlm": {},
    "msd": {},
    "eagle3": {"draft_vocabulary": 100},
}


def make_module(target, seed: int = 0, name: str = "fovea") -> DrafterModule:
    torch.manual_seed(seed)
    kind = drafter_type(name)
    drafter = kind(target.spec, kind.config_type(num_blocks=1, depth=2, **SETTINGS[name]), target.head)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return DrafterModule(drafter, ObjectiveConfig(), optimizer, teaching=Teaching((1, 2), "t"))


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(float(trainer.callback_metrics["train/loss"]))


def fit(data, module, epochs, checkpoint=None, folder=None):
    losses = Losses()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[losses], enable_checkpointing=False, **quiet)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if folder is not None:
        trainer.save_checkpoint(folder / "run.ckpt")
    return losses.seen


@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_the_same(name, tmp_path, small_target, small_target_path, source) -> None:
    offline, online = modules(tmp_path, small_target, small_target_path, source)
    stored = fit(offline, make_module(small_target, name=name), 2)
    live = fit(online, make_module(small_target, name=name), 2)
    assert stored[-1] < stored[0]
    assert live == pytest.approx(stored, rel=1e-5)


def test_a_target_with_dropout_teaches_alike_throughout(tmp_path, small_target, small_target_path, source) -> None:
    """It is never in training mode, whatever the trainer does to the drafter around a validation."""
    folder = Path(shutil.copytree(small_target_path, tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    careless = load_target(folder)
    losses = []
    for target in (careless, small_target):
        _, online = modules(tmp_path, target, small_target_path, source, val_fraction=0.3)
        losses.append(fit(online, make_module(target), 2))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert all(parameter.grad is None for parameter in careless.model.parameters())
    careless.model.train()
    _, online = modules(tmp_path, careless, small_target_path, source, val_fraction=0.3)
    assert fit(online, make_module(small_target), 2) != pytest.approx(losses[1], rel=1e-2), "the dropout has no effect"


def test_a_run_begun_offline_goes_on_online(tmp_path, small_target, small_target_path, source) -> None:
    offline, online = modules(tmp_path, small_target, small_target_path, source)
    whole = fit(offline, make_module(small_target), 2)
    offline, online = modules(tmp_path, small_target, small_target_path, source)
    first = fit(offline, make_module(small_target), 1, folder=tmp_path)
    second = fit(online, make_module(small_target, seed=5), 2, checkpoint=tmp_path / "run.ckpt")
    assert first + second == pytest.approx(whole, rel=1e-5)


def test_what_cannot_be_used_is_counted_and_replaced(tmp_path, small_target, small_target_path, source, caplog) -> None:
    _, online = modules(tmp_path, small_target, small_target_path, source, batch_size=1)
    for name in ("1.png", "5.png"):
        (tmp_path / name).write_bytes(b"no picture")
    with caplog.at_level(logging.WARNING):
        keys = [key for _ in range(2) for batch in online.train_dataloader() for key in batch.keys]
        online.teardown()
    assert len(keys) == 16
    assert set(keys) == {f"k{i}" for i in range(8)} - {"k1", "k5"}
    assert sum("'k1' gives no sample" in record.message for record in caplog.records) == 1
    assert "2 conversations gave no sample: 2 broken picture" in caplog.text


def test_answer_tokens_are_counted(tmp_path, small_target, small_target_path, source) -> None:
    offline, online = modules(tmp_path, small_target, small_target_path, source)
    counts = [data.answer_token_counts(small_target.spec.vocab_size) for data in (offline, online)]
    assert counts[0].tolist() == counts[1].tolist()
    assert counts[0].sum() > 0


def test_validation_shares_no_picture_with_training(tmp_path, small_target, small_target_path, source) -> None:
    _, online = modules(tmp_path, small_target, small_target_path, source, val_fraction=0.3)
    train = {key for batch in online.train_dataloader() for key in batch.keys}
    val = {key for batch in online.val_dataloader() for key in batch.keys}
    assert val
    assert not train & val
    assert train | val == {f"k{i}" for i in range(8)}


def test_finished_artifacts_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"data\.train is /somewhere, finished artifacts"):
        OnlineDataModule(load_target=lambda: None, export=ExportConfig(mid_layers=(1,)), train="/somewhere")
