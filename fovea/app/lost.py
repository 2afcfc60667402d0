"""Jobs of a sweep that its launcher has lost: the process in which a job was to run, or was watched, is gone.

Launchers of Hydra's raise where that happens, and the sweep would end without a summary, though other jobs still run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from fovea.app.outcome import FILE, Outcome

#: File in a sweep's folder with the tracebacks of its launcher.
LOG = "launcher.log"


class LostJobError(RuntimeError):
    """A job's process is gone and has left no result."""


def record_lost_jobs() -> None:
    """Lets the launcher of this process's sweep, whichever it is, record the jobs that it loses, and go on.

    To be called before the sweeper is built. Hydra takes launchers from its plugins alone, so they are met there.
    """
    plugins = Plugins.instance()
    instantiate = plugins.instantiate_launcher

    def instantiate_recording(
        hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> RecordingLauncher:
        return RecordingLauncher(instantiate(hydra_context, task_function, config), config, hydra_context)

    plugins.instantiate_launcher = instantiate_recording


class RecordingLauncher(Launcher):
    """Another launcher, whose lost jobs are failed ones in their folders; it raises for unusable settings alone."""

    def __init__(self, launcher: Launcher, config: DictConfig, hydra_context: HydraContext) -> None:
        """``config``: that of the sweep, for which ``launcher`` has been set up."""
        self.launcher = launcher
        self.config = config
        self.hydra_context = hydra_context

    def setup(self, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing: the launcher within has been set up."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        try:
            with _every_result(self.launcher):
                returned: list[Any] = list(self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx))
        except HydraException:
            raise
        except Exception as error:
            self._note(error)
            returned = [error] * len(job_overrides)
        jobs = enumerate(zip(job_overrides, returned, strict=True), start=initial_job_idx)
        return [self._settled(number, overrides, result) for number, (overrides, result) in jobs]

    def _settled(self, number: int, overrides: Sequence[str], result: JobReturn | Exception) -> JobReturn:
        """What the sweeper is told of a job."""
        if isinstance(result, JobReturn):
            if result.status != JobStatus.FAILED:
                return result
            error: Exception = result._return_value  # the public one raises it
            self._note(error)
        else:
            error = result
        job = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(job.hydra.job):
            job.hydra.job.num, job.hydra.job.id = number, f"{job.hydra.job.name}_{number}"
        outcome = _lost(Path(str(job.hydra.sweep.dir), str(job.hydra.sweep.subdir)), job, error)
        return JobReturn(
            list(overrides), status=JobStatus.COMPLETED, _return_value=outcome.optimized(job.optimized_metric)
        )

    def _note(self, error: Exception) -> None:
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.writelines(traceback.format_exception(error))


def _lost(folder: Path, job: DictConfig, error: Exception) -> Outcome:
    """The outcome of the job in ``folder``, recorded there as failed unless the job could say itself how it ended."""
    started = (folder / FILE).is_file()
    outcome = Outcome.read(folder) if started else Outcome(list(job.hydra.overrides.task))
    if outcome.status == "interrupted":
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        outcome.status, outcome.error = "failed", f"{'cut off' if started else 'not started'}: {why}"
        folder.mkdir(parents=True, exist_ok=True)
        outcome.write(folder)
    return outcome


@contextmanager
def _every_result(launcher: Launcher) -> Iterator[None]:
    """Lets ``launcher`` wait for all of its jobs, where it would raise at the first that has no result."""
    kind = type(launcher).__module__
    if "submitit" in kind:
        from submitit import Job

        with _replaced(Job, "results", _result_of_submitit):
            yield
    elif "ray" in kind:
        import ray  # pyright: ignore[reportMissingImports]

        with _replaced(ray, "get", _result_of_ray):
            yield
    else:
        yield


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """``by`` in the place of a function of ``owner``; it is given that function before its arguments."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: by(function, *arguments, **named))
    try:
        yield
    finally:
        setattr(owner, name, function)


def _result_of_submitit(results: Callable[..., list[Any]], job: Any) -> list[Any]:
    if job.exception() is None:  # waits for its end
        return results(job)
    return [LostJobError(f"its process left no result; its state is {job.state}, its output in {job.paths.stderr}")]


def _result_of_ray(get: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return get(*arguments, **named)
    except Exception as error:
        return error
