"""One table and one plot per sweep, failed jobs included."""

from __future__ import annotations

import csv
import json

import pytest
from omegaconf import OmegaConf
from PIL import Image

from fovea.app.sweep import SweepSummary, read_jobs, table, varying

METRICS = ["tau", "decode_speedup", "absent"]


def write_job(folder, name, overrides, status="completed", **metrics):
    (folder / name).mkdir()
    record = {"overrides": overrides, "status": status, "metrics": metrics}
    if status == "failed":
        record["error"] = "rho must lie in (0, 1], got 7"
    (folder / name / "outcome.json").write_text(json.dumps(record))


def settings(folder, overrides):
    return OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "overrides": {"task": overrides}}})


def test_columns_are_what_varies_and_what_was_measured(tmp_path):
    for number, rho in enumerate(["0.6", "0.8", "0.95"]):
        write_job(tmp_path, str(number), [f"drafter.retrieval.rho={rho}", "seed=1"], tau=4.0 + number)
    jobs = read_jobs(tmp_path)
    fields = varying(jobs, ["drafter.retrieval.rho", "seed"])
    assert table(jobs, fields, METRICS) == [
        ["job", "drafter.retrieval.rho", "status", "tau"],
        ["0", "0.6", "completed", "4"],
        ["1", "0.8", "completed", "5"],
        ["2", "0.95", "completed", "6"],
    ]


def test_lists_and_empty_values_are_told_apart(tmp_path):
    written = ["[1,2]", "[3,4]", "", "null"]
    for number, layers in enumerate(written):
        write_job(tmp_path, str(number), [f"model.mid_layers={layers}"], tau=4.0, decode_speedup=2.0)
    SweepSummary(METRICS).on_multirun_end(settings(tmp_path, ["model.mid_layers=[1,2],[3,4],,null"]))
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [row["model.mid_layers"] for row in rows] == written


def test_jobs_keep_their_order_beyond_ten(tmp_path):
    for number in range(12):
        write_job(tmp_path, str(number), [f"seed={number}"])
    assert [job.name for job in read_jobs(tmp_path)] == [str(n) for n in range(12)]


def test_a_failed_job_is_in_the_table_and_in_the_exit_code(tmp_path, capsys):
    write_job(tmp_path, "0", ["r=0.8", "k=4"], tau=4.5, decode_speedup=2.0)
    write_job(tmp_path, "1", ["r=7", "k=4"], status="failed")
    write_job(tmp_path, "2", ["r=0.9", "k=8"], tau=4.75, decode_speedup=2.5)
    with pytest.raises(SystemExit) as stop:
        SweepSummary(METRICS).on_multirun_end(settings(tmp_path, ["r=0.8,7,0.9", "k=4,8"]))
    assert stop.value.code == 1
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [(row["r"], row["status"], row["tau"]) for row in rows] == [
        ("0.8", "completed", "4.5"),
        ("7", "failed", ""),
        ("0.9", "completed", "4.75"),
    ]
    printed = capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text() in printed
    assert "2 of 3 jobs completed" in printed
    assert "rho must lie in (0, 1], got 7" in printed
    with Image.open(tmp_path / "summary.png") as picture:
        assert len(picture.convert("L").getcolors(256)) > 2


def test_a_sweep_over_names_has_the_jobs_for_its_axis(tmp_path):
    for number, mode in enumerate(["mass", "topk"]):
        write_job(tmp_path, str(number), [f"mode={mode}"], tau=4.0, decode_speedup=2.0)
    SweepSummary(METRICS).on_multirun_end(settings(tmp_path, ["mode=mass,topk"]))
    assert (tmp_path / "summary.png").stat().st_size > 1000
