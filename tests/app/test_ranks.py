"""Sweeps whose jobs take two processes each, sharded runs, and runs that a cluster starts again."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from fovea.evaluation.results import SpeedResult
from tests.app.conftest import left_over, only, run

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def sweep(workplace):
    """Two jobs that train on two processes each, measuring speed after the epoch, and one that is refused."""
    folder, overrides = workplace
    settings = ["trainer.max_epochs=1", "trainer.devices=2", "data.loader.batch_size=2", "hydra.sweep.dir=two each"]
    done = run("train.py", folder, "-m", *overrides, *settings, "drafter.retrieval.rho=0.5,7,0.9")
    return folder / "two each", done


class TestASweepOverSeveralDevices:
    def test_its_jobs_run_and_the_failed_one_is_told(self, sweep):
        folder, done = sweep
        assert done.returncode == 1, done.stderr
        assert "2 of 3 jobs completed" in done.stdout
        rows = list(csv.DictReader((folder / "summary.csv").open()))
        found = [(row["drafter.retrieval.rho"], row["status"]) for row in rows]
        assert found == [("0.5", "completed"), ("7", "failed"), ("0.9", "completed")]
        assert "retrieval.rho is 7" in json.loads((folder / "1" / "outcome.json").read_text())["error"]
        assert "Traceback" in (folder / "1" / "train.log").read_text()
        assert not left_over(folder.parent)

    def test_each_was_trained_and_measured_by_two(self, sweep):
        folder, _ = sweep
        for job in ("0", "2"):
            for evaluation in ("epoch_01", "final"):
                result = SpeedResult.load(folder / job / "evaluation" / evaluation)
                assert result.settings["processes"] == 2
                assert len({prompt.speculative.key for prompt in result.prompts}) == 2
                assert result.figures()["all"]["exact_matches"] == 1.0
            state = torch.load(folder / job / "checkpoints" / "last.ckpt", weights_only=True)
            assert state["global_step"] == 3  # 11 samples, 2 x 2 a step

    def test_they_are_one_group_in_wandb(self, sweep):
        folder, _ = sweep
        for job, rho in (("0", "0.5"), ("2", "0.9")):
            (tracked,) = (folder / job / "wandb").glob("offline-run-*")
            content = next(tracked.glob("*.wandb")).read_bytes()
            assert f"rho={rho}".encode() in content
            assert b"two each" in content


def test_a_command_that_is_started_again_goes_on(workplace):
    """As a cluster does behind a preemption: the same command, with the folder of the run and resume=own."""
    folder, overrides = workplace
    command = [
        *overrides,
        "resume=own",
        "hydra.run.dir=again",
        "speed_eval=off",
        "logger=csv",
        "data.loader.batch_size=4",
    ]
    for epochs in (1, 2):
        done = run("train.py", folder, *command, f"trainer.max_epochs={epochs}")
        assert done.returncode == 0, done.stderr
    state = torch.load(folder / "again" / "checkpoints" / "last.ckpt", weights_only=True)
    assert (state["epoch"], state["global_step"]) == (1, 6)
    steps = []
    for path in ("earlier_metrics_1", "metrics"):
        rows = csv.DictReader((folder / "again" / path / "metrics.csv").open())
        steps += [int(row["step"]) for row in rows if row["train/loss"]]
    assert steps == list(range(6))
    shutil.rmtree(folder / "again")


def test_a_sharded_run_passes_gates_measures_and_exports_and_goes_on_alone(workplace):
    """The whole job with FSDP2, and what it leaves is what any other run leaves."""
    folder, overrides = workplace
    settings = ["strategy=fsdp2", "trainer.devices=2", "trainer.max_epochs=1", "data.loader.batch_size=2", "logger=csv"]
    done = run("train.py", folder, *overrides, *settings, "name=sharded")
    assert done.returncode == 0, done.stderr
    assert "Parity gate" in done.stderr
    sharded = only(folder, "outputs/*/*-sharded")
    for evaluation in ("epoch_01", "final"):
        result = SpeedResult.load(sharded / "evaluation" / evaluation)
        assert result.settings["processes"] == 2
        assert result.figures()["all"]["exact_matches"] == 1.0
    state = torch.load(sharded / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    weights = load_file(sharded / "drafter" / "model.safetensors")
    assert state.keys() == {f"drafter.{name}" for name in weights}
    assert all(torch.equal(state[f"drafter.{name}"], weight) for name, weight in weights.items())
    alone = ["strategy=auto", "trainer.devices=1", "trainer.max_epochs=2", "speed_eval=off", "name=alone"]
    done = run("train.py", folder, f"resume={sharded}", *alone)
    assert done.returncode == 0, done.stderr
    resumed = torch.load(only(folder, "outputs/*/*-alone") / "checkpoints" / "last.ckpt", weights_only=True)
    assert (resumed["epoch"], resumed["global_step"]) == (1, 3 + 6)
