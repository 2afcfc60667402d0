"""The training module under Lightning: normalisation, empty batches, checkpoints, rates, logging."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from fovea.drafters.checkpoint import Teaching
from fovea.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from fovea.drafters.specvlm import SpecVlmConfig, SpecVlmDrafter
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.module import DivergedError, DrafterModule, UnrollConfig
from fovea.training.objective import ObjectiveConfig
from fovea.training.schedules import deepspeed_log, linear
from fovea.visual.compression import BRANCHES
from tests.training.conftest import SPEC


def loader(samples, batch_size: int) -> DataLoader:
    return DataLoader(samples, batch_size=batch_size, collate_fn=TeacherBatch.collate)


def trainer(tmp_path: Path, **settings) -> L.Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
        "gradient_clip_val": 0.5,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**(quiet | settings))


def make_module(drafter, optimizer=None, **settings) -> DrafterModule:
    return DrafterModule(drafter, ObjectiveConfig(), optimizer or partial(torch.optim.SGD, lr=0.5), **settings)


def weights(module: DrafterModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.drafter.parameters()])


class Trace(L.Callback):
    """Weights, rate and logged metrics at every optimizer step."""

    def __init__(self) -> None:
        self.weights, self.rates, self.metrics = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        self.weights.append(weights(pl_module).clone())
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def train(tmp_path, make_drafter, data: DataLoader, *, optimizer=None, module_settings=None, **settings) -> Trace:
    trace = Trace()
    module = make_module(make_drafter(), optimizer, **(module_settings or {}))
    trainer(tmp_path, callbacks=[trace], **{"max_epochs": 1, **settings}).fit(module, data)
    return trace


def test_gate_of_a_compressor_is_logged(tmp_path, head, samples) -> None:
    """Shares of its branches, over the pictures of a micro-batch; a batch without pictures logs none."""
    drafter = SpecVlmDrafter(SPEC, SpecVlmConfig(depth=2), head)
    trace = Trace()
    batches = DataLoader([samples[4], *samples[:3]], batch_size=None, collate_fn=lambda s: TeacherBatch.collate([s]))
    module = make_module(drafter)
    trainer(tmp_path, callbacks=[trace], max_epochs=1).fit(module, batches)
    assert not any("gate" in name for name in trace.metrics[0])
    for metrics in trace.metrics[1:]:
        shares = [metrics[f"train/gate_{branch}"] for branch in BRANCHES]
        assert sum(shares) == 1
        assert metrics["train/visual_rows"] <= metrics["train/visual_tokens"]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8), (3, 3)])
def test_accumulated_micro_batches_make_the_same_step(
    tmp_path, make_drafter, samples, batch_size, accumulation, clip
) -> None:
    settings = {"gradient_clip_val": clip}
    whole = train(tmp_path, make_drafter, loader(samples, 8), **settings)
    parts = train(tmp_path, make_drafter, loader(samples, batch_size), accumulate_grad_batches=accumulation, **settings)
    moved = (whole.weights[0] - weights(make_module(make_drafter()))).abs().max()
    assert len(whole.weights) == len(parts.weights) == 1
    assert moved > 1e-3
    torch.testing.assert_close(parts.weights[0], whole.weights[0], rtol=0, atol=1e-6)
    for name in ("train/loss", "train/loss_kl", "train/Z", "train/top1_step_1", "train/grad_norm"):
        assert parts.metrics[0][name] == pytest.approx(whole.metrics[0][name], rel=1e-5)


def test_last_window_of_an_epoch_may_be_short(tmp_path, make_drafter, samples) -> None:
    short = train(tmp_path, make_drafter, loader(samples[:6], 2), accumulate_grad_batches=8)
    whole = train(tmp_path, make_drafter, loader(samples[:6], 6))
    torch.testing.assert_close(short.weights[0], whole.weights[0], rtol=0, atol=1e-6)


def test_a_micro_batch_without_answers_changes_nothing(tmp_path, make_drafter, make_sample, samples) -> None:
    silent = [make_sample(20 + i, "tpttt") for i in range(4)]
    with_silent = train(tmp_path, make_drafter, loader(samples[:4] + silent, 4), accumulate_grad_batches=2)
    without = train(tmp_path, make_drafter, loader(samples[:4], 4))
    assert with_silent.metrics[0]["train/loss"] == pytest.approx(without.metrics[0]["train/loss"])
    torch.testing.assert_close(with_silent.weights[0], without.weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_without_answers_leaves_the_weights(
    tmp_path, make_drafter, make_sample, samples, accumulation
) -> None:
    silent = [make_sample(20 + i, "tpttt") for i in range(4)]
    data = loader(samples[:4] + silent + samples[4:], 4 // accumulation)
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    trace = train(tmp_path, make_drafter, data, optimizer=adamw, accumulate_grad_batches=accumulation)
    first, second, third = trace.weights
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert third.isfinite().all()


def test_nothing_of_the_target_is_trained_or_saved(tmp_path, make_drafter, samples, head) -> None:
    before = [t.clone() for t in (head.embedding, head.lm_head_weight, head.norm_weight)]
    module = make_module(make_drafter(), partial(torch.optim.AdamW, lr=0.01))
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, loader(samples, 4))
    run.save_checkpoint(tmp_path / "last.ckpt")
    after = (head.embedding, head.lm_head_weight, head.norm_weight)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not head.embedding.requires_grad
    assert head.lm_head_weight.grad is None

    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == {f"drafter.{name}" for name in module.drafter.state_dict()}
    trained = sum(p.numel() for p in module.drafter.parameters())
    moments = checkpoint["optimizer_states"][0]["state"].values()
    assert sum(t.numel() for state in moments for t in state.values() if t.ndim) == 2 * trained


def resumable(tmp_path, make_drafter, epochs: int, callbacks=()) -> tuple[DrafterModule, L.Trainer, Trace]:
    trace = Trace()
    module = make_module(
        make_drafter(),
        partial(torch.optim.AdamW, lr=0.01),
        scheduler=partial(deepspeed_log, warmup_steps=4),
        unroll=UnrollConfig(max_anchors=5),
        teaching=Teaching((1, 2), "weights of seed 0"),
    )
    run = trainer(tmp_path, max_epochs=epochs, callbacks=[trace, *callbacks], enable_checkpointing=bool(callbacks))
    return module, run, trace


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path, make_drafter, samples) -> None:
    module, run, whole = resumable(tmp_path, make_drafter, 4)
    run.fit(module, loader(samples, 4))

    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    saving = ModelCheckpoint(tmp_path, filename="stopped", save_last=True)
    module, run, first = resumable(tmp_path, make_drafter, 4, [Stop(), saving])
    run.fit(module, loader(samples, 4))
    module, run, second = resumable(tmp_path, lambda: make_drafter(seed=7), 4)
    run.fit(module, loader(samples, 4), ckpt_path=tmp_path / "last.ckpt")

    assert len(first.weights) == len(second.weights) == 4
    assert first.rates + second.rates == pytest.approx(whole.rates)
    torch.testing.assert_close(second.weights[-1], whole.weights[-1])


def test_a_foreign_checkpoint_is_refused_by_name(tmp_path, make_drafter, samples) -> None:
    module, run, _ = resumable(tmp_path, make_drafter, 3)
    run.fit(module, loader(samples, 4))
    run.save_checkpoint(tmp_path / "last.ckpt")
    module, run, _ = resumable(tmp_path, make_drafter, 4)
    module.teaching = Teaching((1, 2), "weights of seed 1")
    named = "target_fingerprint was 'weights of seed 0' and .*Resume with the model and data settings .model.path="
    with pytest.raises(ValueError, match=named):
        run.fit(module, loader(samples, 4), ckpt_path=tmp_path / "last.ckpt")
    module, run, _ = resumable(tmp_path, partial(make_drafter, num_blocks=1), 4)
    with pytest.raises(RuntimeError, match=r"drafter\.blocks\.1"):
        run.fit(module, loader(samples, 4), ckpt_path=tmp_path / "last.ckpt")


def test_a_run_that_would_read_other_layers_is_not_resumed(tmp_path, head) -> None:
    """Their weights have the same shapes."""

    def reading(layers: tuple[int, int]) -> Eagle3Drafter:
        return Eagle3Drafter(SPEC, Eagle3Config(depth=3, draft_vocabulary=None, feature_layers=layers), head)

    module = resumable(tmp_path, partial(reading, (1, 2)), 1)[0]
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    resumable(tmp_path, partial(reading, (1, 2)), 1)[0].on_load_checkpoint(checkpoint)
    other = resumable(tmp_path, partial(reading, (1, 3)), 1)[0]
    remedy = r"Resume with the drafter settings \(drafter\.feature_layers=\) of its run, or train anew without resume="
    with pytest.raises(ValueError, match=rf"feature_layers was \(1, 2\) and is \(1, 3\)\. {remedy}"):
        other.on_load_checkpoint(checkpoint)
    del checkpoint["drafter"]["reads"]
    other.on_load_checkpoint(checkpoint)  # an older one does not say


def rates(tmp_path, make_drafter, samples, accumulation: int, **trainer) -> list[float]:
    """Learning rates of the optimizer steps over ten samples, two of them warm-up."""
    trace = train(
        tmp_path,
        make_drafter,
        loader(samples[:5] * 2, 1),
        module_settings={"scheduler": partial(linear, warmup_steps=2)},
        accumulate_grad_batches=accumulation,
        **trainer,
    )
    return [m["train/lr"] for m in trace.metrics]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rates_follow_max_steps_over_several_epochs(tmp_path, make_drafter, samples, accumulation) -> None:
    """7 optimizer steps, wherever the epochs end."""
    used = rates(tmp_path, make_drafter, samples, accumulation, max_epochs=-1, max_steps=7)
    assert used == pytest.approx([0.5 * min(c / 2, (7 - c) / 5) for c in range(7)])


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 10), (4, 3)])
def test_rates_follow_optimizer_steps(tmp_path, make_drafter, samples, accumulation, steps) -> None:
    used = rates(tmp_path, make_drafter, samples, accumulation)
    assert used == pytest.approx([0.5 * min(c / 2, (steps - c) / (steps - 2)) for c in range(steps)])


def test_unknown_length_is_refused(tmp_path, make_drafter, samples) -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(samples)

    module = make_module(make_drafter(), scheduler=partial(linear, warmup_steps=0))
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        trainer(tmp_path, max_epochs=1).fit(module, loader(Endless(), 2))


def test_validation_gives_the_losses_of_the_whole_set(tmp_path, make_drafter, samples) -> None:
    run, module = trainer(tmp_path), make_module(make_drafter())
    (small,) = run.validate(module, loader(samples, 3), verbose=False)
    (whole,) = run.validate(module, loader(samples, 8), verbose=False)
    trace = train(tmp_path, make_drafter, loader(samples, 8))
    for name, value in whole.items():
        assert small[name] == pytest.approx(value, rel=1e-5)
        assert trace.metrics[0][name.replace("val/", "train/")] == pytest.approx(value, rel=1e-5)
    terms = {"loss", "loss_hid", "loss_mid", "loss_kl", "loss_ce", "loss_cmp", "Z", "supervised_tokens"}
    assert whole.keys() >= {f"val/{name}" for name in terms | {f"top1_step_{s}" for s in range(1, 5)}}


def test_loggers_get_every_term(tmp_path, make_drafter, samples) -> None:
    logger = CSVLogger(tmp_path, version="run")
    module = make_module(make_drafter(), partial(torch.optim.AdamW, lr=0.01))
    trainer(tmp_path, logger=logger, log_every_n_steps=1, max_epochs=3).fit(module, loader(samples, 4))
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"train/loss", "train/loss_mid", "train/grad_norm", "train/lr", "train/retrieval_k"} <= set(
        header.split(",")
    )
    losses = [float(row.split(",")[header.split(",").index("train/loss")]) for row in rows]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path, make_drafter, samples) -> None:
    samples[0].last[:] = torch.nan
    with pytest.raises(DivergedError, match="optimizer step 1"):
        train(tmp_path, make_drafter, loader(samples, 8))


def test_mixed_precision_makes_nearly_the_same_step(tmp_path, make_drafter, samples) -> None:
    full = train(tmp_path, make_drafter, loader(samples, 8))
    mixed = train(tmp_path, make_drafter, loader(samples, 8), precision="bf16-mixed")
    start = weights(make_module(make_drafter()))
    assert mixed.weights[0].dtype == torch.float32
    assert mixed.metrics[0]["train/loss"] == pytest.approx(full.metrics[0]["train/loss"], rel=0.01)
    steps = torch.stack([mixed.weights[0] - start, full.weights[0] - start])
    assert torch.cosine_similarity(*steps, dim=0) > 0.98


@pytest.mark.parametrize("name", ["steps", "max_anchors"])
def test_unroll_below_1_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"unroll.{name} is 0"):
        UnrollConfig(**{name: 0})


def test_more_steps_than_depths_are_refused(make_drafter) -> None:
    with pytest.raises(ValueError, match=r"unroll.steps is 5.*raise drafter.depth"):
        make_module(make_drafter(depth=3), unroll=UnrollConfig(steps=5))


class Ranked(L.LightningDataModule):
    """Every rank takes every ``world_size``-th sample, in order."""

    def __init__(self, samples, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> DataLoader:
        return loader(self.samples[self.trainer.global_rank :: self.trainer.world_size], self.batch_size)


@pytest.mark.slow
def test_two_ranks_make_the_steps_of_one(tmp_path, make_drafter, make_sample, samples) -> None:
    """In the first step one rank has no picture, in the second one has no answer."""
    text = [make_sample(30 + i, "tttaaaaat"[: 5 + i]) for i in range(4)]
    silent = [make_sample(40 + i, "tpttt") for i in range(4)]
    pictures = [samples[i] for i in (0, 2, 3, 6)]
    first = [s for pair in zip(text, pictures, strict=True) for s in pair]
    second = [s for pair in zip(samples[4:], silent, strict=True) for s in pair]
    module = make_module(make_drafter())
    trainer(tmp_path, max_epochs=1).fit(module, Ranked(first + second, 8))
    shared = make_module(make_drafter())
    trainer(tmp_path, max_epochs=1, devices=2, strategy="ddp_spawn").fit(shared, Ranked(first + second, 4))
    torch.testing.assert_close(weights(shared), weights(module), rtol=0, atol=2e-6)
