"""Which evaluations are found in a folder, and what they are called."""

from __future__ import annotations

import json

import pytest

from fovea.evaluation.page.entries import find_entries
from tests.evaluation.page.made_up import job


def test_a_run_an_evaluation_and_a_sweep_are_found(tmp_path):
    run = job(tmp_path / "run")
    job(run, evaluation="epoch_01")
    for number, nodes in enumerate((6, 10)):
        job(tmp_path / "sweep" / str(number), overrides=[f"decode.tree.nodes={nodes}", "ckpt=x", "name=n"])
    (tmp_path / "sweep" / "2").mkdir()
    failed = {"overrides": [], "status": "failed", "metrics": {}, "error": "no memory"}
    (tmp_path / "sweep" / "2" / "outcome.json").write_text(json.dumps(failed))
    entries, without = find_entries([run, tmp_path / "sweep"])
    assert [entry.folder.name for entry in entries] == ["final"] * 3
    assert [entry.label for entry in entries] == ["fovea", "fovea, nodes=6", "fovea, nodes=10"]
    assert without == {"2": "failed: no memory"}
    only, _ = find_entries([run / "evaluation" / "epoch_01"])
    assert only[0].folder.name == "epoch_01"
    assert only[0].job == run


def test_names_stay_apart_and_nothing_is_counted_twice(tmp_path):
    for name in ("one", "two"):
        job(tmp_path / name, "eaglevlm")
    job(tmp_path / "evaluation" / "pld", "pld")
    entries, _ = find_entries([tmp_path, tmp_path / "one"])
    assert sorted(entry.label for entry in entries) == ["eaglevlm, one", "eaglevlm, two", "pld"]


def test_training_time_comes_from_the_folder_of_checkpoints(tmp_path):
    (tmp_path / "runs" / "dream").mkdir(parents=True)
    (tmp_path / "runs" / "dream" / "training.json").write_text('{"seconds": 12.5, "stages": ["dream"]}')
    job(tmp_path / "evaluation" / "dream", "dream", config={"checkpoints": str(tmp_path / "runs")})
    job(tmp_path / "evaluation" / "pld", "pld", config={"checkpoints": str(tmp_path / "runs")})
    entries, _ = find_entries([tmp_path])
    assert {entry.label: entry.training_s for entry in entries} == {"dream": 12.5, "pld": None}


def test_a_folder_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no speed evaluation; give the folder"):
        find_entries([tmp_path])
    with pytest.raises(FileNotFoundError, match="none is no folder, so it holds no speed evaluation"):
        find_entries([tmp_path / "none"])
