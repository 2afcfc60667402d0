"""What Lightning says of every run is not said; what is particular to one is."""

import logging
import warnings

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from fovea.app import logs


@pytest.fixture
def quiet(monkeypatch):
    """Lightning as a job has it, and as it was afterwards."""
    for name in ("lightning", *logs._SPEAKERS):
        for attribute in ("filters", "handlers"):
            monkeypatch.setattr(logging.getLogger(name), attribute, [])
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    with warnings.catch_warnings():
        logs.quiet_lightning()
        yield


def train(folder) -> None:
    """One step, and a checkpoint of it."""
    trainer = L.Trainer(
        max_steps=1,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    trainer.save_checkpoint(folder / "last.ckpt")


def test_a_training_and_its_checkpoint_say_nothing(quiet, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        L.seed_everything(1)
        train(tmp_path)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").info("Something of this run alone")
    assert [record.getMessage() for record in caplog.records] == ["Something of this run alone"]


def test_without_it_they_do(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    for name in logs._SPEAKERS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    with caplog.at_level(logging.INFO, logger="lightning"), caplog.at_level(logging.INFO):
        train(tmp_path)
    assert "`weights_only` was not set" in caplog.text
