"""Gates, checkpoints and throughput in real training runs on a small target's own answers."""

from __future__ import annotations

import csv
import errno
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from callbacks.drafter_checkpoint import DrafterCheckpoint
from callbacks.gates import Gates
from callbacks.throughput import Throughput
from fovea.drafters.checkpoint import load_drafter, teaching_of
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.gates import GateError


def trainer(tmp_path: Path, *callbacks: L.Callback, **settings) -> L.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
        "max_epochs": 2,
        "enable_checkpointing": any(isinstance(c, DrafterCheckpoint) for c in callbacks),
    }
    return L.Trainer(callbacks=list(callbacks), **(quiet | settings))


def spoiled(taught, **faults) -> DataLoader:
    changed = [replace(s, **{name: fault(getattr(s, name)) for name, fault in faults.items()}) for s in taught]
    return DataLoader(changed, batch_size=2, collate_fn=TeacherBatch.collate)


class Interrupt(L.Callback):
    """Presses Ctrl-C once: in a batch, while validating, or while an epoch is being evaluated."""

    def __init__(self, where: str, step: int) -> None:
        self.where, self.step = where, step

    def _maybe(self, where: str, trainer) -> None:
        if where == self.where and trainer.global_step == self.step:
            self.step = -1
            raise KeyboardInterrupt

    def on_train_batch_start(self, trainer, *_) -> None:
        self._maybe("batch", trainer)

    def on_validation_batch_end(self, trainer, *_) -> None:
        self._maybe("validation", trainer)

    def on_train_epoch_end(self, trainer, *_) -> None:
        self._maybe("evaluation", trainer)


class Steps(L.Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_before_zero_grad(self, trainer, *_) -> None:
        self.seen.append(trainer.global_step)


def test_open_gates_say_what_they_saw(tmp_path, make_module, batches, caplog) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer(tmp_path, Gates()).fit(make_module(), batches)
    (line,) = [r.getMessage() for r in caplog.records if "Teacher gate" in r.getMessage()]
    assert "100.00% of" in line
    assert "Parity gate" in line


@pytest.mark.parametrize("fault", [lambda states: states.roll(1, 0), lambda states: states.flip(1)])
def test_wrong_states_stop_the_run_before_its_first_step(tmp_path, make_module, taught, fault) -> None:
    run = trainer(tmp_path, Gates())
    with pytest.raises(GateError, match="teacher gate"):
        run.fit(make_module(), spoiled(taught, last=fault))
    assert run.global_step == 0


def test_one_wrong_token_among_few_stops_no_run(tmp_path, make_module, taught, caplog) -> None:
    """Such as a near-tie of a target in bf16; the gate looks at more artifacts than it was told, as they are short."""
    spoiled = taught[0].ids.clone()
    spoiled[taught[0].answer_mask.nonzero()[0]] += 1
    loader = DataLoader([replace(taught[0], ids=spoiled), *taught[1:]], collate_fn=TeacherBatch.collate)
    tokens = sum(int(sample.answer_mask.sum()) for sample in taught)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer(tmp_path, Gates(samples=1), max_epochs=1).fit(make_module(), loader)
    assert f"{(tokens - 1) / tokens:.2%} of {tokens} answer tokens" in caplog.text


def test_answers_of_others_pass_the_teacher_gate_by(tmp_path, make_module, taught) -> None:
    run = trainer(tmp_path, Gates("dataset"), max_epochs=1)
    run.fit(make_module(), spoiled(taught, last=lambda states: states.flip(1)))
    assert run.global_step == 4


def test_gates_do_not_change_training(tmp_path, make_module, taught) -> None:
    def train(*callbacks: L.Callback) -> torch.Tensor:
        module = make_module()
        torch.manual_seed(1)
        shuffled = DataLoader(taught, batch_size=2, shuffle=True, collate_fn=TeacherBatch.collate)
        trainer(tmp_path, *callbacks, max_epochs=1).fit(module, shuffled)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(train(Gates()), train())


def test_a_run_leaves_its_newest_and_its_best_drafter(tmp_path, make_module, batches, small_target) -> None:
    class Worsen(L.Callback):
        """The second epoch ends with worse weights."""

        def on_train_epoch_end(self, trainer, pl_module) -> None:
            pl_module.log("score", float(trainer.current_epoch), on_epoch=True)

    module, keep = make_module(), DrafterCheckpoint(tmp_path, monitor="score")
    first: list[torch.Tensor] = []

    class Note(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            first.append(pl_module.drafter.norm.weight.detach().clone())

    trainer(tmp_path, Worsen(), Note(), keep).fit(module, batches)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == [
        "checkpoints/last.ckpt",
        "drafter/config.json",
        "drafter/model.safetensors",
        "drafter_best/config.json",
        "drafter_best/model.safetensors",
    ]
    newest = load_drafter(tmp_path / "drafter", small_target.head, small_target.spec)
    for name, tensor in module.drafter.state_dict().items():
        assert torch.equal(newest.state_dict()[name], tensor)
    best = load_drafter(tmp_path / "drafter_best", small_target.head, small_target.spec)
    assert torch.equal(best.norm.weight, first[0])
    assert not torch.equal(first[0], first[1])
    assert teaching_of(tmp_path / "drafter") == module.teaching


@pytest.mark.parametrize(("where", "step"), [("batch", 3), ("validation", 4), ("evaluation", 4), ("batch", 6)])
def test_ctrl_c_leaves_a_run_that_resumes(tmp_path, make_module, batches, where, step) -> None:
    steps = Steps()
    run = trainer(tmp_path, Interrupt(where, step), steps, DrafterCheckpoint(tmp_path))
    with pytest.raises(SystemExit):
        run.fit(make_module(), batches, batches)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == step

    resumed = trainer(tmp_path, steps, DrafterCheckpoint(tmp_path))
    resumed.fit(make_module(seed=5), batches, batches, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert resumed.global_step == 8
    assert len(steps.seen) == 8


def test_a_checkpoint_that_finds_no_room_leaves_none_of_it_behind(tmp_path, make_module, batches, monkeypatch) -> None:
    def full(self, filepath, *args, **kwargs):
        Path(filepath).parent.mkdir(exist_ok=True)
        Path(filepath).write_bytes(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(L.Trainer, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        trainer(tmp_path, DrafterCheckpoint(tmp_path)).fit(make_module(), batches)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "last.ckpt" in path.name]


def test_a_copied_run_keeps_its_best(tmp_path, make_module, batches) -> None:
    class Score(L.Callback):
        """The first epoch is the best."""

        def on_train_epoch_end(self, trainer, pl_module) -> None:
            pl_module.log("score", float(trainer.current_epoch), on_epoch=True)

    there, here = tmp_path / "there", tmp_path / "here"
    trainer(tmp_path, Score(), DrafterCheckpoint(there, monitor="score"), max_epochs=1).fit(make_module(), batches)
    there.rename(here)
    best = (here / "drafter_best" / "model.safetensors").read_bytes()
    run = trainer(tmp_path, Score(), DrafterCheckpoint(here, monitor="score"), max_epochs=2)
    run.fit(make_module(), batches, ckpt_path=here / "checkpoints" / "last.ckpt")
    assert run.global_step == 8
    assert (here / "drafter_best" / "model.safetensors").read_bytes() == best
    assert (here / "drafter" / "model.safetensors").read_bytes() != best
    assert not there.exists()


def test_a_diverged_run_keeps_its_last_sound_checkpoint(tmp_path, make_module, batches) -> None:
    class Poison(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            if trainer.global_step == 3:
                with torch.no_grad():
                    pl_module.drafter.norm.weight.fill_(torch.nan)

    with pytest.raises(RuntimeError, match="not finite in optimizer step 4"):
        trainer(tmp_path, Poison(), DrafterCheckpoint(tmp_path, monitor=None, every_n_steps=2)).fit(
            make_module(), batches
        )
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2


def test_a_metric_that_nobody_logs_is_named(tmp_path, make_module, batches) -> None:
    with pytest.warns(UserWarning, match=r"monitor is val/accuracy.*val/loss"):
        trainer(tmp_path, DrafterCheckpoint(tmp_path, monitor="val/accuracy")).fit(make_module(), batches, batches)
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert not (tmp_path / "drafter_best").exists()


@pytest.mark.parametrize("settings", [{"mode": "least"}, {"every_n_steps": 0}])
def test_bad_checkpoint_settings_are_refused(tmp_path, settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        DrafterCheckpoint(tmp_path, **settings)


class Clock(L.Callback):
    """Time that passes while a batch is trained on, validated on, and evaluated on between epochs: 1, 10 and 100 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def on_train_batch_start(self, *_) -> None:
        self.now += 1

    def on_validation_batch_start(self, *_) -> None:
        self.now += 10

    def on_train_epoch_end(self, *_) -> None:
        self.now += 100


def test_throughput_counts_tokens_without_padding(tmp_path, make_module, batches, taught, monkeypatch) -> None:
    clock, logger = Clock(), CSVLogger(tmp_path, version="run")
    monkeypatch.setattr("callbacks.throughput.time.perf_counter", lambda: clock.now)
    settings = {"log_every_n_steps": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer(tmp_path, Throughput(), clock, logger=logger, **settings).fit(make_module(), batches)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = {name: value for row in csv.DictReader(file) for name, value in row.items() if value}
    tokens, supervised = sum(len(s.ids) for s in taught), sum(int(s.answer_mask.sum()) for s in taught)
    assert float(logged["throughput/tokens_per_s"]) == pytest.approx(tokens / len(batches))
    assert float(logged["throughput/supervised_tokens_per_s"]) == pytest.approx(supervised / len(batches))
    assert float(logged["throughput/steps_per_s"]) == pytest.approx(2 / len(batches))
    assert 0.05 < float(logged["throughput/peak_memory_gib"]) < 100


def test_training_time_is_that_of_the_steps_and_goes_on_in_a_resumed_run(
    tmp_path, make_module, batches, monkeypatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("callbacks.throughput.time.perf_counter", lambda: clock.now)

    def counted(checkpoint: Path | None = None, **settings) -> float:
        run = trainer(tmp_path, Throughput(), clock, DrafterCheckpoint(tmp_path, every_n_steps=1), **settings)
        run.fit(make_module(), batches, batches, ckpt_path=checkpoint, weights_only=True)
        return float(run.callback_metrics["throughput/train_s"])

    assert counted(max_epochs=2) == 2 * len(batches)
    assert counted(tmp_path / "checkpoints" / "last.ckpt", max_epochs=5) == 5 * len(batches)
