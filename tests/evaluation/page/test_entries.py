"""Which evaluations are found in a folder, and what they are called."""

from __future__ import annotations

import json
import re

import pytest

from fovea.evaluation.page.entries import find_entries
from tests.evaluation.page.made_up import job, keep_trajectories


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


def test_targets_and_benchmarks_tell_evaluations_apart(tmp_path):
    for number, (target, benchmark) in enumerate((("big", "mme"), ("big", "chartqa"), ("small", "chartqa"))):
        job(tmp_path / str(number), target_name=target, benchmark=benchmark, overrides=[f"benchmark={benchmark}"])
    job(tmp_path / "pld", "pld", target_name="big", benchmark="mme")
    entries, _ = find_entries([tmp_path])
    assert sorted(entry.label for entry in entries) == [
        "fovea, big, chartqa",
        "fovea, big, mme",
        "fovea, small, chartqa",
        "pld",
    ]


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


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("traces.jsonl", cut, r"traces\.jsonl, line 3: not JSON"),
        ("traces.jsonl", lambda path: path.write_bytes(b""), r"traces\.jsonl holds 0 answers and .* counts 3"),
        ("traces.jsonl", lambda path: path.write_bytes(b'{"a": 1}\n' * 3), r"traces\.jsonl, line 1: 'transformers' is"),
        (
            "traces.jsonl",
            lambda path: swap(path, '"total_s": 0.0', '"total_s": "0'),
            r"traces\.jsonl, line 1: not JSON",
        ),
        ("traces.jsonl", lambda path: swap(path, '"accepted": 1', '"accepted": "x"'), "no figures can be made of it"),
        ("traces.jsonl", lambda path: swap(path, '"outcome"', '"result"'), "line 1: not as it was written"),
        ("evaluation.json", cut, r"evaluation\.json, line \d+: not JSON"),
        ("evaluation.json", lambda path: path.write_bytes(b"\xff\xfd"), r"evaluation\.json, line 1: not UTF-8"),
        ("evaluation.json", lambda path: path.write_text("{}"), r"evaluation\.json: 'failed' is missing"),
        ("trajectories.jsonl", lambda path: swap(path, '"pictures"', '"images"'), "line 1: 'pictures' is missing"),
        (
            "trajectories/0-0.png",
            lambda path: path.write_bytes(b"no"),
            r"line 1: the picture .*0-0\.png cannot be read",
        ),
        ("../../config.yaml", lambda path: path.write_text("a: [1"), r"config\.yaml: no settings"),
        ("../../provenance.json", lambda path: path.write_text("[]"), r"provenance\.json: must be a JSON object"),
        ("../../metrics.csv", lambda path: path.write_text("step,train/loss\n1,x\n"), r"metrics\.csv, line 2: no row"),
    ],
)
def test_a_damaged_job_is_named_with_its_file_and_the_others_are_shown(tmp_path, file, damage, message):
    good, bad = (job(tmp_path / "jobs" / name) for name in ("good", "bad"))
    keep_trajectories(bad / "evaluation" / "final")
    damage(bad / "evaluation" / "final" / file)
    entries, without = find_entries([tmp_path / "jobs"])
    assert [entry.job for entry in entries] == [good]
    assert list(without) == ["bad"]
    assert re.search(message, without["bad"]), without["bad"]
    assert str(tmp_path) not in without["bad"], "a page tells no folder of the machine"
    with pytest.raises(FileNotFoundError, match=f"no speed evaluation that can be shown .bad: .*{message}"):
        find_entries([bad])


def swap(path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
