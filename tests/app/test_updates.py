"""A schedule that is longer than the training is refused before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from fovea.app.settings import read_settings
from fovea.app.sources import make_datamodule
from fovea.app.typed import SettingError
from fovea.app.updates import require_updates
from tests.app.test_devices import composed


@pytest.fixture
def job(tmp_path):
    """``(*overrides)``: settings of a training on 12 conversations, 2 per update."""
    path = tmp_path / "some.jsonl"
    turns = [{"role": "user", "content": "what?"}]
    path.write_text("".join(json.dumps({"key": str(n), "messages": turns}) + "\n" for n in range(12)))

    def make(*overrides: str) -> DictConfig:
        settings = ("model=smollm2", f"data.path={path}", "trainer.devices=1", "trainer.accelerator=cpu")
        more = ("data.loader.batch_size=2", "trainer.accumulate_grad_batches=1", "scheduler=linear")
        return composed(tmp_path, *settings, *more, *overrides)

    return make


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (["trainer.max_epochs=3"], 18),
        (["trainer.max_epochs=3", "trainer.max_steps=5"], 5),
        (["trainer.max_epochs=3", "trainer.devices=2"], 9),
        (["trainer.max_epochs=3", "trainer.limit_train_batches=1"], 3),
        (["trainer.max_epochs=3", "trainer.devices=auto"], 18),
    ],
)
def test_the_warm_up_may_be_as_long_as_the_training_and_no_longer(job, overrides, most):
    require_updates(job(*overrides, f"scheduler.warmup_steps={most}"), 12)
    named = (
        rf"^12 conversations make at most {most} optimizer updates: scheduler\.warmup_steps is {most + 1} .*; shorten"
    )
    with pytest.raises(SettingError, match=named):
        require_updates(job(*overrides, f"scheduler.warmup_steps={most + 1}"), 12)


@pytest.mark.parametrize(
    "overrides",
    [["scheduler=constant"], ["scheduler.warmup_steps=null", "scheduler.warmup_ratio=0.9"], ["trainer.max_epochs=-1"]],
)
def test_schedules_without_a_length_of_their_own_and_trainings_without_end_pass(job, overrides):
    require_updates(job(*overrides), 1)


def test_it_is_checked_before_the_target_is_loaded_and_anything_exported(job, small_target_path, tmp_path):
    cfg = job("trainer.max_epochs=1", "scheduler.warmup_steps=7", "model.mid_layers=[1,2]")

    def make(cfg: DictConfig):
        def load():
            raise KeyError("loaded")

        return make_datamodule(cfg, read_settings(cfg), Path(small_target_path), load, lambda device: load())

    with pytest.raises(SettingError, match=r"12 conversations make at most 6 optimizer updates: .* is 7"):
        make(cfg).prepare_data()
    assert not list(tmp_path.glob("artifacts/*"))
    cfg.scheduler.warmup_steps = 6
    with pytest.raises(KeyError, match="loaded"):
        make(cfg).prepare_data()
