"""The whole job on a small random target: train, resume, evaluate, sweep, and what each leaves behind."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fovea.evaluation.results import SpeedResult
from tests.app.conftest import ROOT, left_over, only, run


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
    assert outcome["metrics"].pop("train_s") > 0
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


def test_prompts_that_were_trained_on_are_told_of_or_left_out(trained, workplace, tmp_path):
    """The exported drafter alone says where its data lie: ``data.path`` is not typed."""
    folder, overrides = workplace
    drafter = shutil.copytree(trained / "drafter", tmp_path / "drafter")
    (folder / "manifests").mkdir()
    lines = [json.dumps({"key": f"k.{number}", "ids": [f"k.{number}"], "images": []}) for number in range(10)]
    (folder / "manifests/conversations.jsonl").write_text("\n".join(lines))
    typed = [f"ckpt={drafter}", *(override for override in overrides if not override.startswith("data.path"))]
    try:
        done = run("evaluate.py", folder, *typed, "name=seen")
        exclude = f"benchmark.exclude={folder / 'conversations.jsonl'}"
        again = run("evaluate.py", folder, *typed, "name=unseen", exclude)
    finally:
        shutil.rmtree(folder / "manifests")
    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    assert "2 of the 2 prompts of heldout, the first 'k.0', or their pictures were trained on" in done.stderr
    assert exclude in done.stderr
    reports = [only(folder, f"outputs/*/*-{name}") / "report.json" for name in ("seen", "unseen")]
    seen, unseen = (json.loads(path.read_text())["settings"] for path in reports)
    assert seen["benchmark_trained_on"] == 2
    assert "benchmark_trained_on" not in unseen
    assert unseen["benchmark_records"] == {"read": 12, "kept": 2, "trained on": 10}


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


def evaluated(folder: Path, trained: Path, name: str, *overrides: str) -> Path:
    done = run("evaluate.py", folder, f"ckpt={trained}", f"name={name}", "speed.prompts=5", "logger=csv", *overrides)
    assert done.returncode == 0, done.stderr
    return only(folder, f"outputs/*/*-{name}")


def test_an_evaluation_on_two_processes_is_that_on_one(trained, workplace):
    """An odd number of prompts, each answered once; one folder, in the order of the benchmark, with equal counts."""
    folder, _ = workplace
    jobs = [evaluated(folder, trained, f"on_{n}", f"trainer.devices={n}") for n in (1, 2)]
    alone, shared = (SpeedResult.load(job / "evaluation" / "final") for job in jobs)
    assert shared.settings["processes"] == 2
    keys = [prompt.speculative.key for prompt in alone.prompts]
    assert [prompt.speculative.key for prompt in shared.prompts] == keys
    assert len(set(keys)) == 5
    for one, two in zip(alone.prompts, shared.prompts, strict=True):
        assert one.speculative.tokens == two.speculative.tokens
        assert one.autoregressive.tokens == two.autoregressive.tokens
        assert [r.committed for r in one.speculative.rounds] == [r.committed for r in two.speculative.rounds]
    figures = [result.figures()["all"] for result in (alone, shared)]
    for name in ("samples", "tau", "exact", "ties", "unexplained", "rounds", "new_tokens", "reach_rate"):
        assert figures[0][name] == figures[1][name], name
    assert json.loads((jobs[1] / "outcome.json").read_text())["status"] == "completed"
    assert (jobs[1] / "report.md").is_file()
    assert not left_over(folder)


def test_a_checkpoint_says_where_it_comes_from(trained):
    """Away from its folder too, in plain types: commit, versions, command, settings, and what taught it."""
    origin = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)["origin"]
    plain = json.loads(json.dumps(origin))
    assert plain == plain | json.loads((trained / "provenance.json").read_text())
    assert {"commit", "dirty", "versions", "command", "started"} <= origin.keys()
    assert (origin["config"]["name"], origin["config"]["trainer"]["max_epochs"]) == ("first", 2)
    assert "${" not in json.dumps(origin["config"])
    fingerprint = origin["fingerprints"]["train"]
    assert fingerprint["weights"]
    assert fingerprint["data"]
    record = json.loads((trained / "drafter" / "config.json").read_text())
    assert record["teaching"]["target_fingerprint"] == fingerprint["weights"]
    assert record["origin"]["fingerprints"]["target"] == fingerprint["weights"]
    assert record["origin"]["commit"] == origin["commit"]


def test_a_search_for_a_rule_looks_at_two_metrics(trained, workplace):
    """Three trials by Optuna over rho, K_min and K_max: none is refused, and both metrics are told."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install -e '.[optuna]'")
    folder, _ = workplace
    done = run(
        "evaluate.py",
        folder,
        "-m",
        f"ckpt={trained}",
        "search=retrieval",
        "hydra.sweeper.n_trials=3",
        "speed.prompts=1",
        "logger=csv",
        "hydra.sweep.dir=search",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((folder / "search" / "summary.csv").open()))
    assert len(rows) == 3
    for row in rows:
        rho, k_min, k_max = (float(row[f"drafter.retrieval.{name}"]) for name in ("rho", "k_min", "k_max"))
        assert 0.5 <= rho <= 0.99
        assert 2 <= k_min <= min(64, k_max)
        assert k_max <= 256
        assert float(row["tau"]) >= 1
    results = (folder / "search" / "optimization_results.yaml").read_text()
    assert "values" in results
    assert "drafter.retrieval.rho" in results


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
