"""Jobs whose process is gone: each has its outcome, and the sweep goes on to its summary."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from fovea.app.lost import LOG, RecordingLauncher
from fovea.app.outcome import Outcome, ending
from fovea.app.sweep import read_jobs

JOBS = [["seed=1"], ["seed=2"], ["seed=3"]]


def completed(value: object) -> JobReturn:
    return JobReturn(status=JobStatus.COMPLETED, _return_value=value)


class Launches(Launcher):
    """A launcher that does what it is told."""

    def __init__(self, does):
        self.does = does

    def setup(self, **_):
        raise AssertionError("it has been set up")

    def launch(self, job_overrides, initial_job_idx):
        return self.does()


def launch(folder, launcher: Launcher) -> list[object]:
    """Launches ``JOBS``, the first of which has the number 4; returns what a sweeper is told of them."""
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})

    def job(config, overrides):
        hydra = {"job": {"name": "train"}, "sweep": {"dir": str(folder), "subdir": "${hydra.job.num}"}}
        hydra["overrides"] = {"task": overrides}
        return OmegaConf.create({"hydra": hydra, "optimized_metric": ["tau", "speed"]})

    context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=job))
    recording = RecordingLauncher(launcher, config, context)  # type: ignore[arg-type]
    return [returned.return_value for returned in recording.launch(JOBS, 4)]


def write(folder, name: str, seed: int, **fields) -> None:
    (folder / name).mkdir()
    Outcome([f"seed={seed}"], **fields).write(folder / name)


def test_a_launcher_that_raises_leaves_an_outcome_of_each_job(tmp_path):
    """Of one that was done, of one that ran, and of one that had not begun."""
    write(tmp_path, "4", 1, status="completed", metrics={"tau": 3.0})
    write(tmp_path, "5", 2)

    def raises():
        raise ChildProcessError("a worker is gone\nfor reasons of its own")

    assert launch(tmp_path, Launches(raises)) == [[3.0, None], [None, None], [None, None]]
    jobs = read_jobs(tmp_path)
    assert [(job.name, job.fields, job.outcome.status, job.outcome.error) for job in jobs] == [
        ("4", {"seed": "1"}, "completed", ""),
        ("5", {"seed": "2"}, "failed", "cut off: a worker is gone"),
        ("6", {"seed": "3"}, "failed", "not started: a worker is gone"),
    ]
    assert "ChildProcessError: a worker is gone" in (tmp_path / LOG).read_text()


def test_a_job_that_could_not_record_its_error_is_recorded(tmp_path):
    write(tmp_path, "5", 2, status="failed", error="its own word")
    failed = JobReturn(status=JobStatus.FAILED, _return_value=OSError("no folder"))
    assert launch(tmp_path, Launches(lambda: [completed(1.0), failed, failed])) == [1.0, [None, None], [None, None]]
    assert [job.outcome.error for job in read_jobs(tmp_path)] == ["its own word", "not started: no folder"]
    assert (tmp_path / LOG).read_text().count("OSError: no folder") == 2


def test_unusable_settings_are_left_to_hydra(tmp_path):
    def raises():
        raise ConfigCompositionException("no such group")

    with pytest.raises(ConfigCompositionException):
        launch(tmp_path, Launches(raises))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="pip install -e '.[slurm]'")
def test_all_jobs_of_submitit_are_waited_for(tmp_path):
    """As Hydra's launcher asks for their results; the first kills its process, the second raises."""
    import submitit

    class LocalLauncher(Launches):
        __module__ = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"

    def does():
        executor = submitit.AutoExecutor(tmp_path / "submitit", cluster="local")
        jobs = [
            executor.submit(sys.exit, 7),
            executor.submit(int, "seven"),
            executor.submit(JobReturn, status=JobStatus.COMPLETED, _return_value=2.5),
        ]
        return [job.results()[0] for job in jobs]

    before = submitit.Job.results
    assert launch(tmp_path, LocalLauncher(does)) == [[None, None], [None, None], 2.5]
    errors = [job.outcome.error for job in read_jobs(tmp_path)]
    assert len(errors) == 2
    assert all(error.startswith("not started: its process left no result; its state is FINISHED") for error in errors)
    assert submitit.Job.results is before


def test_all_tasks_of_ray_are_waited_for(tmp_path, monkeypatch):
    """As far as it can be shown without Ray."""

    class RayLauncher(Launches):
        __module__ = "hydra_plugins.hydra_ray_launcher.ray_launcher"

    def get(task):
        if task != 2:
            raise ConnectionError(f"the worker of {task} died")
        return completed(2.5)

    ray = SimpleNamespace(get=get)
    monkeypatch.setitem(sys.modules, "ray", ray)
    told = launch(tmp_path, RayLauncher(lambda: [ray.get(task) for task in (1, 2, 3)]))
    assert told == [[None, None], 2.5, [None, None]]
    assert [job.outcome.error for job in read_jobs(tmp_path)] == [
        "not started: the worker of 1 died",
        "not started: the worker of 3 died",
    ]
    assert ray.get is get


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with code 3"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")]
)
def test_an_exit_code_is_told(code, words):
    assert ending(code) == words
