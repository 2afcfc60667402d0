"""Jobs of a sweep as runs of their own, each in a process of its own.

The sweep starts the job's own command, waits, and reads from its folder how it ended: so whatever kills a job, the
sweep and the others go on. And where a job takes several devices, its processes start its command again, which must
not be that of the whole sweep.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fovea.app.errors import going_on
from fovea.app.outcome import FILE, Outcome, ending
from fovea.app.ranks import several_devices
from fovea.app.tracking import place_in_sweep
from fovea.app.watch import SWEEP

log = logging.getLogger("fovea")

#: Seconds that a job has to end when the sweep is ended.
PATIENCE = 30
#: What belongs to the sweep and not to its jobs.
_OF_SWEEPS = (
    "hydra.sweep",
    "hydra.run",
    "hydra.mode",
    "hydra.launcher",
    "hydra.sweeper",
    "hydra/launcher",
    "hydra/sweeper",
)
#: Groups that choose these, and settings of their own.
_GROUPS = re.compile(r"[+~]*(launch|search)\b")
#: How launchers tell a process its place, by how the names of variables begin.
_PLACES = ("RANK", "LOCAL_", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "TORCHELASTIC_")


class ApartError(RuntimeError):
    """A job that ran apart has failed, and its log says how; the message is the last word of it."""


def runs_apart(cfg: DictConfig) -> bool:
    """Whether the job of ``cfg``, one of a sweep, is to run in a process of its own.

    A job of SLURM is one already, and the one to which submitit lets SLURM's signals come.
    """
    submitted = str(HydraConfig.get().launcher["_target_"]).endswith("SlurmLauncher")
    return not cfg.plan and (several_devices(cfg) or not submitted)


def run_apart(cfg: DictConfig, task: FunctionType) -> dict[str, float]:
    """Runs the job of ``cfg`` in its folder; returns its headline numbers.

    Args:
        cfg: settings of the job.
        task: what an entry point runs, as it stands in its script.

    Raises:
        ApartError: it failed.
    """
    folder = Path(cfg.paths.output_dir)
    (folder / FILE).unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PLACES)}
    environment[SWEEP] = str(os.getpid())
    with _endings_reach_us():
        # A group of its own, which can be ended as a whole.
        process = subprocess.Popen(
            list(command(cfg, task)), env=environment, cwd=HydraConfig.get().runtime.cwd, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    outcome = Outcome.read(folder) if (folder / FILE).is_file() else Outcome([])
    if outcome.status == "completed":
        return outcome.metrics
    if outcome.status == "interrupted":  # it could not say so itself
        memory = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        outcome.error = f"its process {ending(code)}{memory}. {going_on(folder)}".rstrip()
        log.error("The job failed: %s", outcome.error)
    raise ApartError(outcome.error)


def command(cfg: DictConfig, task: FunctionType) -> Iterator[str]:
    """The command line of the job of ``cfg`` as a run of its own, by the script in which ``task`` stands."""
    hydra = HydraConfig.get()
    yield from (sys.executable, task.__globals__["__file__"])
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":  # as the sweep was told by --config-dir
            yield from ("--config-dir", source.path)
    yield from (o for o in hydra.overrides.task if not _GROUPS.match(o))
    yield from (o for o in hydra.overrides.hydra if not o.lstrip("+~").startswith(_OF_SWEEPS))
    yield f"hydra.run.dir={quoted(cfg.paths.output_dir)}"
    for name, node in (cfg.logger or {}).items():
        yield from (f"logger.{name}.{field}={quoted(text)}" for field, text in place_in_sweep(node).items())


def quoted(text: str) -> str:
    """``text`` as Hydra reads it back, whatever it holds."""
    return "'" + str(text).replace("\\", "\\\\").replace("'", "\\'") + "'"


@contextmanager
def _endings_reach_us() -> Iterator[None]:
    """Lets a request to end (SIGTERM) unwind the stack, so that no job outlives its sweep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen) -> None:
    """Ends a job that still runs, and with it the processes that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with suppress(ProcessLookupError):  # mostly nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
