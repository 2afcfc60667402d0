"""The speed evaluation callback: what it measures and logs, and that training never notices it."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from PIL import Image
from torch import Tensor

from callbacks.speed_evaluation import SpeedEvaluation
from callbacks.speed_logging import log_to_wandb, scalars
from fovea.decoding.growth import TreeConfig
from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.evaluation.drafter_evaluation import DrafterEvaluation, decoding_copy, illustrative_prompts
from fovea.evaluation.results import ALL, SpeedResult
from fovea.evaluation.speed_config import SpeedConfig
from fovea.evaluation.trajectory_files import load_trajectories
from fovea.visual.retrieval import RetrievalConfig

CONFIG = SpeedConfig(max_new_tokens=6, prompts_per_epoch=4, warmup_prompts=1, warmup_tokens=2, transformers_prompts=0)
TREE = TreeConfig(width=2, depth=2, nodes=6)


class Training(L.LightningModule):
    """Trains a drafter towards nothing in particular, with dropout, and notes what the optimizer sees."""

    def __init__(self, target) -> None:
        super().__init__()
        torch.manual_seed(0)
        retrieval = RetrievalConfig(k_min=1, k_max=4)
        self.drafter = FoveaDrafter(
            target.spec, FoveaConfig(num_blocks=1, depth=2, correction_width=8, retrieval=retrieval), target.head
        )
        self.dropout = torch.nn.Dropout(0.5)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.drafter.training
        noise = random.random() + np.random.rand()
        loss = sum((self.dropout(weight) ** 2).mean() for weight in self.drafter.parameters()) * (1 + noise)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Iterator[Tensor]:
        return torch.utils.data.DataLoader(torch.zeros(3, 1))


class Loads:
    """Hands out the small target and counts how often it was asked."""

    def __init__(self, target) -> None:
        self.target = target
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.target


def train(
    target, callbacks: list[L.Callback], folder: Path, loggers=False, epochs: int = 2
) -> tuple[Training, L.Trainer]:
    module = Training(target)
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module)
    return module, trainer


@pytest.fixture(scope="module")
def trained(small_target, small_conversations, tmp_path_factory):
    """Two epochs with an evaluation after each; the module, the trainer, the callback, the run's folder, the loads."""
    run = tmp_path_factory.mktemp("run")
    loads = Loads(small_target)
    evaluation = DrafterEvaluation(loads, small_conversations, TREE, CONFIG, settings={"note": "x"}, progress=False)
    callback = SpeedEvaluation(evaluation, run)
    logger = CSVLogger(run, name=None, version="metrics")
    module, trainer = train(small_target, [callback], run, [logger])
    return module, trainer, callback, run, loads


def test_training_is_the_same_as_without(trained, small_target, tmp_path):
    evaluated = trained[0]
    alone, _ = train(small_target, [], tmp_path)
    assert evaluated.losses == alone.losses
    assert len(alone.losses) == 6
    for (name, weight), other in zip(alone.state_dict().items(), evaluated.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name


def test_target_is_loaded_once_and_stays_out_of_the_checkpoint(trained, small_target, tmp_path):
    module, trainer, _, _, loads = trained
    assert loads.count == 1
    path = tmp_path / "training.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"].keys() == {f"drafter.{name}" for name in module.drafter.state_dict()}
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in module.parameters()}
    assert not optimized & {id(p) for p in small_target.model.parameters()}
    assert all(p.grad is None for p in small_target.model.parameters())


def test_every_epoch_leaves_traces_and_a_picture(trained):
    _, _, callback, run, _ = trained
    for epoch in ("epoch_01", "epoch_02"):
        result = SpeedResult.load(run / "evaluation" / epoch)
        # Four conversations, one of each source; one of them has three turns.
        assert {p.speculative.source for p in result.prompts} == {"image", "two", "text", "turns"}
        assert [p.comparison.outcome for p in result.prompts] == ["exact"] * 6
        assert result.settings["tree"] == {"width": 2, "depth": 2, "nodes": 6, "count_root": True, "levels": "eagle"}
        assert result.settings["most_tokens_per_round"] == 4
        assert result.settings["note"] == "x"
        assert min(Image.open(run / "evaluation" / epoch / "evidence.png").size) > 200
    assert callback.result == SpeedResult.load(run / "evaluation" / "epoch_02")


def test_scalars_reach_csv_and_callback_metrics(trained):
    _, trainer, callback, run, _ = trained
    with (run / "metrics" / "metrics.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row.get("speed/tau")]
    assert [int(row["epoch"]) for row in rows] == [0, 1]
    expected = scalars(callback.result)
    assert {"speed/tau", "speed/decode_speedup", "speed/exact_matches", "acceptance/reach_1"} <= expected.keys()
    assert {"retrieval/k_mean", "speed/two/tau", "speed/unexplained_differences"} <= expected.keys()
    for name, value in expected.items():
        assert float(rows[1][name]) == pytest.approx(value, rel=1e-5)
        assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-5)


def test_every_second_epoch(small_target, small_conversations, tmp_path):
    evaluation = DrafterEvaluation(Loads(small_target), small_conversations[5:6], TREE, CONFIG, progress=False)
    train(small_target, [SpeedEvaluation(evaluation, tmp_path, every_n_epochs=2)], tmp_path, epochs=3)
    assert [path.name for path in (tmp_path / "evaluation").iterdir()] == ["epoch_02"]
    assert not (tmp_path / "evaluation" / "epoch_02" / "evidence.png").exists()  # a prompt without a picture
    with pytest.raises(ValueError, match="every_n_epochs is 0"):
        SpeedEvaluation(evaluation, tmp_path, every_n_epochs=0)


def test_target_goes_home_also_after_a_failure(small_target, small_conversations, tmp_path):
    moves: list[str] = []

    class Movable:
        device = torch.device("cpu")

        def to(self, device) -> None:
            moves.append(str(device))

        def __getattr__(self, name: str):
            return getattr(small_target, name)

    broken = deepcopy(small_conversations[0])
    object.__setattr__(broken, "images", (tmp_path / "none.png",))
    evaluation = DrafterEvaluation(lambda: Movable(), [broken], TREE, CONFIG, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of the 1 prompts"):
        evaluation.run(Training(small_target).drafter, tmp_path, device="meta")
    assert moves == ["meta", "cpu"]


def test_the_copy_that_decodes_is_the_drafter_in_the_targets_format(small_target):
    drafter = Training(small_target).drafter.double().train()
    copy = decoding_copy(drafter, small_target)
    assert copy.dtype == small_target.dtype == torch.float32
    assert not copy.training
    assert drafter.training
    assert drafter.dtype == torch.float64
    assert not any(p.requires_grad for p in copy.parameters())
    assert copy.head.embedding.data_ptr() == small_target.head.embedding.data_ptr()
    for (name, weight), ours in zip(drafter.state_dict().items(), copy.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, weight.float(), msg=name)


def test_illustrative_prompts_show_pictures_first_and_do_not_depend_on_the_drafter(trained, small_conversations):
    result, count = trained[2].result, trained[2].result.figures()[ALL]["samples"]
    chosen = illustrative_prompts(small_conversations, result, 3)
    again = illustrative_prompts(small_conversations, SpeedResult.load(trained[3] / "evaluation" / "epoch_01"), 3)
    assert chosen == again
    assert len(chosen) == 3
    assert chosen[0].images
    everything = illustrative_prompts(small_conversations, result, 100)
    assert 3 < len(everything) <= count
    first = {source: next(c for c in everything if c.source == source) for source in {c.source for c in everything}}
    assert all(chosen[place] in first.values() for place in range(min(3, len(first))))
    only_text = [c for c in small_conversations if not c.images]
    assert all(not c.images for c in illustrative_prompts(only_text, result, 1))


def test_trajectories_are_kept_beside_the_traces_unless_nobody_wants_them(trained, small_target, small_conversations):
    folder = trained[3] / "evaluation" / "epoch_02"
    records = load_trajectories(folder)
    answers = {prompt.speculative.key: prompt.speculative for prompt in trained[2].result.prompts}
    assert len(records) == 3
    for record in records:
        assert record["tokens"] == answers[record["key"]].tokens
        assert [r["committed"] for r in record["rounds"]] == [r.committed for r in answers[record["key"]].rounds]
        assert all((folder / name).is_file() for name in record["pictures"])
    none = replace(CONFIG, trajectories=0)
    evaluation = DrafterEvaluation(Loads(small_target), small_conversations[:1], TREE, none, progress=False)
    evaluation.run(trained[0].drafter, trained[3] / "bare", device="cpu")
    assert {path.name for path in (trained[3] / "bare").iterdir()} == {
        "traces.jsonl", "evaluation.json", "evidence.png",
    }  # fmt: skip


def test_wandb_gets_histograms_a_table_and_pictures(trained):
    class Run:
        def log(self, record, **kwargs) -> None:
            assert not kwargs  # an explicit step would clash with Lightning's
            self.record = record

    wandb = pytest.importorskip("wandb")
    run, callback = Run(), trained[2]
    log_to_wandb(run, callback.result, trained[3] / "evaluation" / "epoch_02", global_step=6)
    record = run.record
    assert record["trainer/global_step"] == 6
    assert len(record["speed/answers"].data) == len(callback.result.prompts)
    assert isinstance(record["retrieval/k"], wandb.Histogram)
    nodes = sum(len(r.retrieval) for t in callback.result.speculative for r in t.rounds)
    assert sum(record["retrieval/k"].histogram) == nodes
    assert sum(record["acceptance/accepted_drafts"].histogram) == callback.result.figures()[ALL]["rounds"]
    for name in ("retrieval/evidence", "retrieval/cardinality", "acceptance/by_depth"):
        assert isinstance(record[name], wandb.Image)


def test_a_real_offline_wandb_run_takes_it(small_target, small_conversations, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    evaluation = DrafterEvaluation(Loads(small_target), small_conversations[:1], TREE, CONFIG, progress=False)
    logger = WandbLogger(project="test", save_dir=tmp_path, offline=True)
    try:
        train(small_target, [SpeedEvaluation(evaluation, tmp_path)], tmp_path, [logger], epochs=1)
        assert logger.experiment.summary["speed/tau"] >= 1
        assert logger.experiment.summary["retrieval/evidence"]
    finally:
        wandb.finish()
