"""Jobs of a sweep that take several devices: each is a run of its own, in a process of its own.

The processes of such a job start its command again. Within a sweep that would be the whole sweep; so the sweep starts
the job's own command, waits, and reads from its folder how it ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fovea.app.launch import CONFIG_DIR
from fovea.app.outcome import FILE, Outcome
from fovea.app.tracking import place_in_sweep

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
#: Groups that choose these.
_GROUPS = ("launch", "search")
#: How launchers tell a process its place, by how the names of variables begin.
_PLACES = ("RANK", "LOCAL_", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "TORCHELASTIC_")


class ApartError(RuntimeError):
    """A job that ran apart has failed; the message is its own."""


def run_apart(cfg: DictConfig) -> dict[str, float]:
    """Runs the job of ``cfg`` in its folder; returns its headline numbers.

    Raises:
        ApartError: it failed; its log has the traceback.
    """
    folder = Path(cfg.paths.output_dir)
    (folder / FILE).unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PLACES)}
    with _endings_reach_us():
        # A group of its own, which can be ended as a whole.
        process = subprocess.Popen(
            list(command(cfg)), env=environment, cwd=HydraConfig.get().runtime.cwd, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    outcome = Outcome.read(folder) if (folder / FILE).is_file() else Outcome([])
    if outcome.status != "completed":
        logs = ", ".join(sorted(path.name for path in folder.glob("*.log")))
        raise ApartError(outcome.error or f"its process ended with code {code}; see {logs} in {folder}")
    return outcome.metrics


def command(cfg: DictConfig) -> Iterator[str]:
    """The command line of the job of ``cfg`` as a run of its own."""
    hydra = HydraConfig.get()
    yield from (sys.executable, str(CONFIG_DIR.parent / f"{cfg.task}.py"))
    yield from (o for o in hydra.overrides.task if o.lstrip("+~").split("=", 1)[0] not in _GROUPS)
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
