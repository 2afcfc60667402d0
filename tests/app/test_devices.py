"""GPUs that the settings ask for and the machine does not have are refused before anything expensive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from fovea.app import assemble
from fovea.app.devices import devices_named, fewer_devices
from fovea.app.launch import CONFIG_DIR
from fovea.app.ranks import require_devices
from fovea.app.typed import SettingError
from fovea.targets.checkpoint import CheckpointError


def composed(folder: Path, *overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=[*overrides, f"paths.output_dir={folder}", f"paths.cache={folder}"])


@pytest.fixture
def gpus(monkeypatch):
    """``(count)``: the machine has so many GPUs."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("given", "named"),
    [(2, 2), ("2", 2), ("auto", None), (-1, None), ("-1", None), ([0, 3], [0, 3]), ("0,3", [0, 3]), ("1,", [1])],
)
def test_devices_as_lightning_takes_them(given, named):
    assert devices_named(OmegaConf.create({"devices": given}).devices) == named


@pytest.mark.parametrize("given", ["all", "", [], -2, "two"])
def test_devices_that_are_none(given):
    with pytest.raises(SettingError, match=r"trainer\.devices is .*; name a number of devices"):
        devices_named(given)


@pytest.mark.parametrize(
    ("devices", "accumulation", "here", "words"),
    [
        (8, 1, 1, "trainer.devices=1 trainer.accumulate_grad_batches=8"),
        (8, 2, 4, "trainer.devices=4 trainer.accumulate_grad_batches=4"),
        (8, 1, 3, "trainer.devices=2 trainer.accumulate_grad_batches=4"),
        (2, 3, 1, "trainer.devices=1 trainer.accumulate_grad_batches=6"),
    ],
)
def test_fewer_devices_keep_the_global_batch(devices, accumulation, here, words):
    trainer = OmegaConf.create({"devices": devices, "accumulate_grad_batches": accumulation})
    assert fewer_devices(trainer, here) == words


@pytest.mark.parametrize(
    ("overrides", "here", "message"),
    [
        (
            [],
            1,
            r"asks for 2 GPUs, and this machine has 1 GPU; trainer\.devices=1 trainer\.accumulate_grad_batches=2 tr",
        ),
        (["trainer.devices=8"], 2, r"asks for 8 GPUs, and .* has 2 GPUs; trainer\.devices=2 .*_batches=4 trains with"),
        (["trainer.accelerator=gpu"], 0, r"accelerator is gpu and torch finds no GPU .* trainer\.accelerator=cpu"),
        (["trainer.devices=[0,2]"], 2, r"trainer\.devices names GPU 2, and this machine has 2 GPUs, numbered from 0"),
    ],
)
def test_a_training_is_refused_at_its_start(tmp_path, gpus, overrides, here, message):
    """Before its target is looked for, which is not here."""
    gpus(here)
    cfg = composed(tmp_path, "model=qwen25vl", f"model.path={tmp_path / 'nowhere'}", "data.path=x", *overrides)
    with pytest.raises(SettingError, match=message) as error:
        assemble.start(cfg)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "here"),
    [
        ([], 2),
        ([], 0),
        (["trainer.devices=auto"], 1),
        (["trainer.devices=[1]"], 2),
        (["trainer.accelerator=cpu", "trainer.devices=8"], 1),
    ],
)
def test_what_is_there_is_not_refused_nor_processes_on_a_cpu(tmp_path, gpus, overrides, here):
    gpus(here)
    cfg = composed(tmp_path, "model=qwen25vl", f"model.path={tmp_path / 'nowhere'}", "data.path=x", *overrides)
    require_devices(cfg)
    with pytest.raises(CheckpointError, match="there is no folder"):
        assemble.start(cfg)


def test_an_evaluation_names_the_devices_alone(tmp_path, gpus):
    gpus(1)
    cfg = composed(tmp_path, "model=qwen25vl", "trainer.devices=4", name="evaluate")
    with pytest.raises(SettingError, match=r"asks for 4 GPUs, and this machine has 1 GPU; add trainer\.devices=1$"):
        require_devices(cfg)
