"""Jobs and sweeps from the outside: folders, logs, trackers, summaries and exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from fovea.app.job import run_job
from fovea.app.launch import CONFIG_DIR
from fovea.app.outcome import Outcome
from fovea.app.typed import SettingError

SCRIPT = Path(__file__).with_name("job_script.py")
ROOT = SCRIPT.parents[2]


def start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"PYTHONPATH": str(ROOT), "NETRC": str(folder / "no_netrc"), **environment}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *overrides],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=900)
    return process.returncode, printed


def test_two_runs_of_the_same_moment_keep_apart_and_leave_their_records(tmp_path):
    both = [start(tmp_path, "logger=csv", f"seed={seed}") for seed in (1, 2)]
    for process in both:
        code, printed = finish(process)
        assert code == 0, printed
    folders = sorted(tmp_path.glob("outputs/*/*"))
    assert len(folders) == 2
    outcomes = [json.loads((folder / "outcome.json").read_text()) for folder in folders]
    assert sorted(outcome["metrics"]["tau"] for outcome in outcomes) == [1.0, 2.0]
    assert {outcome["status"] for outcome in outcomes} == {"completed"}
    record = json.loads((folders[0] / "provenance.json").read_text())
    assert record["versions"]["torch"]
    assert "job_script.py logger=csv seed=" in record["command"]
    assert {"commit", "dirty", "started", "python"} <= record.keys()
    assert (folders[0] / "metrics" / "metrics.csv").is_file()


@pytest.mark.parametrize("fails", [False, True])
def test_answers_are_kept_until_the_job_is_recorded_as_completed(tmp_path, monkeypatch, fails):
    answers = tmp_path / "evaluation" / "final" / ".answers-00-of-01.jsonl"
    seen = []

    def task(cfg):
        answers.parent.mkdir(parents=True)
        answers.touch()
        if fails:
            raise SettingError("no luck")
        return {"tau": 2.0}

    def write(outcome, folder):
        write_outcome(outcome, folder)
        seen.append((outcome.status, answers.is_file()))

    write_outcome = Outcome.write
    monkeypatch.setattr(Outcome, "write", write)
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    monkeypatch.setattr("fovea.app.job.command_line", lambda: SimpleNamespace(overrides=[]))
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("evaluate", overrides=[f"paths.output_dir={tmp_path}", "logger=csv"])
    with pytest.raises(SystemExit) if fails else nullcontext():
        run_job(cfg, task)
    assert seen == [("interrupted", False), ("failed" if fails else "completed", True)]
    assert answers.is_file() == fails


def test_a_users_error_is_one_sentence_and_its_traceback_is_in_the_log(tmp_path):
    code, printed = finish(start(tmp_path, "logger=csv", "seed=13"))
    assert code == 1
    assert printed.splitlines()[-1] == "seed is 13; choose a lucky one"
    assert "Traceback" not in printed
    (folder,) = tmp_path.glob("outputs/*/*")
    log = (folder / "job_script.log").read_text()
    assert "Traceback" in log
    assert "SettingError: seed is 13" in log
    assert json.loads((folder / "outcome.json").read_text())["status"] == "failed"


def test_online_tracking_without_an_account_is_refused(tmp_path):
    code, printed = finish(start(tmp_path, "logger=wandb"))
    assert code == 1
    assert "WANDB_API_KEY or WANDB_MODE=offline, or choose logger=wandb_offline or logger=csv" in printed
    assert "Traceback" not in printed


def test_an_unknown_field_lists_what_there_is(tmp_path):
    code, printed = finish(start(tmp_path, "drafter.retrieval.roh=0.5"))
    assert code == 1
    assert "drafter.retrieval has no field 'roh' (did you mean 'rho'?); choose from: cardinality, k, " in printed


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Five jobs with W&B offline: the second ends with a user's error, the third with a bug, the fourth is killed."""
    folder = tmp_path_factory.mktemp("sweep")
    code, printed = finish(start(folder, "-m", "seed=1,13,14,15,2"))
    (sweep,) = folder.glob("outputs/sweeps/*/*")
    return sweep, code, printed


class TestSweep:
    def test_the_others_run_and_the_exit_code_tells(self, sweep):
        folder, code, printed = sweep
        assert code == 1
        assert "2 of 5 jobs completed" in printed
        assert printed.count("seed is 13; choose a lucky one") == 2  # by the job, and at the end
        assert "job 3 failed: its process was killed by SIGKILL, as the system does where memory runs out." in printed
        rows = list(csv.DictReader((folder / "summary.csv").open()))
        assert [(row["seed"], row["status"], row["tau"]) for row in rows] == [
            ("1", "completed", "1"),
            ("13", "failed", ""),
            ("14", "failed", ""),
            ("15", "failed", ""),
            ("2", "completed", "2"),
        ]
        assert (folder / "summary.md").is_file()
        assert (folder / "summary.png").is_file()

    def test_failed_jobs_have_their_traceback_in_their_own_log(self, sweep):
        folder, _, _ = sweep
        logs = [(folder / str(job) / "job_script.log").read_text() for job in range(5)]
        assert ["Traceback" in log for log in logs] == [False, True, True, False, False]
        assert "SettingError" in logs[1]
        assert "ZeroDivisionError" in logs[2]

    def test_every_job_has_its_own_tracker_run_finished_whatever_happened(self, sweep):
        folder, _, _ = sweep
        for job, seed in ((0, 1), (1, 13), (2, 14), (4, 2)):
            (run,) = (folder / str(job) / "wandb").glob("offline-run-*")
            content = next(run.glob("*.wandb")).read_bytes()
            assert f"seed={seed}".encode() in content  # in the run's name
            assert folder.name.encode() in content  # the group
            # An unfinished run of an earlier job would have taken the later jobs in.
            assert sum(f"seed={other}".encode() in content for other in (13, 14, 2)) <= 1
