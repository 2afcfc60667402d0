"""The whole job on a small random target: train, resume, evaluate, sweep, and what each leaves behind."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.app.conftest import ROOT, only, run


@pytest.fixture(scope="module")
def trained(workplace) -> Path:
    """Folder of a run of two epochs with all that a user gets, W&B offline among it."""
    folder, overrides = workplace
    done = run("train.py", folder, *overrides, "trainer.max_epochs=2", "name=first")
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout
    return only(folder, "outputs/*/*-first")


def test_a_run_leaves_report_figures_records_and_drafter(trained):
    report = json.loads((trained / "report.json").read_text())
    assert report["figures"]["all"]["samples"] == 2
    assert report["figures"]["all"]["exact_matches"] == 1.0
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2]
    assert report["provenance"]["command"].endswith("name=first")
    assert {path.name for path in (trained / "plots").iterdir()} >= {"speed_by_family.png", "training_curves.png"}
    for record in ("report.md", "config.yaml", "provenance.json", "train.log", "evaluation/final/traces.jsonl"):
        assert (trained / record).is_file(), record
    outcome = json.loads((trained / "outcome.json").read_text())
    assert outcome["status"] == "completed"
    assert outcome["metrics"] == report["summary"]
    losses = [row["train/loss"] for row in csv.DictReader((trained / "metrics" / "metrics.csv").open())]
    assert len([loss for loss in losses if loss]) == 2 * 3  # 11 of 12 conversations, by 4
    assert len(list((trained / "wandb").glob("offline-run-*"))) == 1


def test_checkpoint_and_export_hold_the_drafter_alone_in_plain_types(trained):
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 6
    with safe_open(trained / "drafter" / "model.safetensors", "pt") as weights:
        exported = set(weights.keys())
    assert {f"drafter.{name}" for name in exported} == set(checkpoint["state_dict"])
    assert not [name for name in exported if name.startswith(("head", "lm_head", "embed"))]


def test_resuming_continues_with_the_settings_of_the_run(trained, workplace):
    folder, _ = workplace
    done = run("train.py", folder, f"resume={trained}", "trainer.max_epochs=3", "name=second", "speed_eval=off")
    assert done.returncode == 0, done.stderr
    again = only(folder, "outputs/*/*-second")
    checkpoint = torch.load(again / "checkpoints" / "last.ckpt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (2, 9)
    steps = [
        int(row["step"]) for row in csv.DictReader((again / "metrics" / "metrics.csv").open()) if row["train/loss"]
    ]
    assert steps == [6, 7, 8]
    assert not (again / "evaluation").exists()
    assert not list(trained.glob("checkpoints/*-v1.ckpt"))


def test_the_live_target_teaches_without_artifacts(workplace):
    folder, overrides = workplace
    cache = folder / "online_cache"
    done = run(
        "train.py",
        folder,
        *[override for override in overrides if not override.startswith("paths.cache")],
        *("data.online=true", f"paths.cache={cache}", "trainer.max_steps=2", "name=online", "logger=csv"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((only(folder, "outputs/*/*-online") / "report.json").read_text())
    assert report["figures"]["all"]["exact_matches"] == 1.0
    assert not list(cache.rglob("*.tar"))


def test_a_sweep_over_the_rule_evaluates_one_checkpoint(trained, workplace):
    folder, _ = workplace
    done = run(
        "evaluate.py",
        folder,
        "-m",
        f"ckpt={trained / 'checkpoints' / 'last.ckpt'}",
        "drafter.retrieval.rho=0.3,0.95,7",
        "speed.prompts=1",
        "hydra.sweep.dir=rule",
    )
    assert done.returncode == 1
    sweep = folder / "rule"
    rows = list(csv.DictReader((sweep / "summary.csv").open()))
    assert [(row["drafter.retrieval.rho"], row["status"]) for row in rows] == [
        ("0.3", "completed"),
        ("0.95", "completed"),
        ("7", "failed"),
    ]
    assert "retrieval.rho is 7" in (sweep / "2" / "evaluate.log").read_text()
    settings = [json.loads((sweep / str(job) / "report.json").read_text())["settings"] for job in (0, 1)]
    assert [s["retrieval"]["rho"] for s in settings] == [0.3, 0.95]
    # Everything else is that of the training run.
    assert {s["max_new_tokens"] for s in settings} == {8}
    assert all(float(row["exact_matches"]) == 1 for row in rows if row["status"] == "completed")
    assert "2 of 3 jobs completed" in done.stdout


def test_answers_can_be_sampled_and_processed(trained, workplace):
    folder, _ = workplace
    done = run(
        "evaluate.py",
        folder,
        f"ckpt={trained}",
        "decode.temperature=0.7",
        "decode.top_p=0.9",
        "decode.generation_config=target",
        "name=sampled",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((only(folder, "outputs/*/*-sampled") / "report.json").read_text())
    selection = report["settings"]["selection"]
    assert (selection["temperature"], selection["top_p"], selection["repetition_penalty"]) == (0.7, 0.9, 1.3)
    assert report["figures"]["all"]["exact_matches"] == 1.0


def test_visual_budgets_are_measured_beside_speed(trained, workplace):
    folder, _ = workplace
    done = run(
        "evaluate.py", folder, f"ckpt={trained}", "diagnostics=budget", "diagnostics.focus_tokens=2", "name=budgets"
    )
    assert done.returncode == 0, done.stderr
    job = only(folder, "outputs/*/*-budgets")
    measured = json.loads((job / "evaluation" / "final" / "budget.json").read_text())
    report = json.loads((job / "report.json").read_text())
    pooled = measured["figures"]["all"]["budget"]
    # The prompts of the speed evaluation, and its rounds.
    assert pooled["samples"] == report["figures"]["all"]["samples"] == 2
    assert pooled["states"] == report["figures"]["all"]["rounds"]
    assert pooled["mean_accepted"]["1.0"] == pytest.approx(report["figures"]["all"]["accepted_drafts_per_round"])
    assert (measured["settings"]["focus_tokens"], measured["settings"]["method"]) == (2, "fovea")
    text = (job / "report.md").read_text()
    for link in ("budget.md", "budget_preferred.png", "budget_position.png", "focus_movement.png"):
        assert f"(evaluation/final/{link})" in text
        assert (job / "evaluation" / "final" / link).is_file()


def test_an_exported_drafter_needs_no_run_folder(trained, workplace, tmp_path):
    folder, overrides = workplace
    copied = tmp_path / "a=b" / "drafter"
    shutil.copytree(trained / "drafter", copied)
    done = run(
        "evaluate.py", folder, *overrides, f"ckpt='{copied}'", "decode=paper", "decode.max_new_tokens=8", "name=copy"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((only(folder, "outputs/*/*-copy") / "report.json").read_text())
    assert report["settings"]["tree"]["nodes"] == 40


def test_methods_side_by_side(trained, workplace):
    """A trained one from a folder of checkpoints, the others without; every report names its method."""
    folder, overrides = workplace
    untrained = ["pld", "lookahead", "lookahead_jacobi"]
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "fovea").symlink_to(trained)
    done = run(
        "evaluate.py",
        folder,
        "-m",
        *(override for override in overrides if not override.startswith("drafter.")),
        f"method=fovea,{','.join(untrained)}",
        "checkpoints=checkpoints",
        "logger=csv",
        "hydra.sweep.dir=methods",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((folder / "methods" / "summary.csv").open()))
    assert [row["method"] for row in rows] == ["fovea", *untrained]
    for row in rows:
        report = json.loads((folder / "methods" / row["job"] / "report.json").read_text())
        assert report["settings"]["method"] == row["method"]
        assert (report["settings"]["drafter_parameters"] > 0) == (row["method"] not in untrained)
        assert report["figures"]["all"]["samples"] == 2
        assert report["figures"]["all"]["exact_matches"] == 1.0
        trace = json.loads((folder / "methods" / row["job"] / "evaluation/final/traces.jsonl").open().readline())
        assert trace["speculative"]["method"] == row["method"]


#: Presets of a target of their own, whose numbers fit no other.
OTHER_TARGETS = {"smollm2"}


def test_every_experiment_trains_a_step(workplace):
    folder, overrides = workplace
    done = run(
        "train.py",
        folder,
        "-m",
        *overrides,
        f"experiment=glob(*,exclude=[{','.join(OTHER_TARGETS)}])",
        "trainer.max_steps=1",
        "logger=csv",
        "hydra.sweep.dir=experiments",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((folder / "experiments" / "summary.csv").open()))
    presets = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert {row["experiment"] for row in rows} == presets - OTHER_TARGETS
    assert {row["status"] for row in rows} == {"completed"}
