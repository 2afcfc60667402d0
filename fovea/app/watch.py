"""Processes of one job that watch each other, where the first one has started the others.

A rank that is gone is noticed by the others in the next operation that they share: a training step later, or at the end
of an evaluation, or never while NCCL waits. Lightning looks after its processes, too, and kills them all without a word
of how to go on; so what it would look at is taken over.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from fovea.app.errors import going_on, gone
from fovea.app.outcome import FILE, Outcome, ending

log = logging.getLogger("fovea")

#: Seconds in which the others may say by themselves what is wrong, before they are ended.
PATIENCE = 15.0
#: How Lightning calls the jobs of processes that it starts.
_STARTED = "train_ddp_process_"
#: Variable with the number of the process that has started this one.
_FIRST = "FOVEA_FIRST_RANK"
#: Variable with the number of the process of a sweep that has started this one for a job.
SWEEP = "FOVEA_SWEEP"


def watch(launcher: Any, folder: Path, patience: float = PATIENCE) -> None:
    """Ends the job in ``folder`` some seconds behind the end of a process that Lightning's ``launcher`` has started.

    To be called by the first process before it launches: the others may be gone before they have joined it. A process
    that something else has started (torchrun, srun) watches nobody: who has started it does.
    """
    environment = getattr(launcher, "cluster_environment", None)
    if environment is None or environment.creates_processes_externally:
        return
    os.environ[_FIRST] = str(os.getpid())
    _in_background(_wait_for_others, launcher, folder, patience)


def watch_first(folder: Path, patience: float = PATIENCE) -> None:
    """Ends this process some seconds behind the end of the first one, if Lightning has started this one for it."""
    if _FIRST in os.environ and HydraConfig.get().job.name.startswith(_STARTED):
        _in_background(_wait_for_first, int(os.environ[_FIRST]), folder, patience)


def watch_sweep(folder: Path) -> None:
    """Ends this process behind the end of the one that has started it for a job of a sweep, if one has."""
    if os.environ.get(SWEEP) == str(os.getppid()):  # ranks of the job have the variable, too, and another parent
        _in_background(_wait_for_sweep, os.getppid(), folder)


def _in_background(wait: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=wait, args=arguments, daemon=True, name="watch").start()


def _wait_for_others(launcher: Any, folder: Path, patience: float) -> None:
    while len(launcher.procs) < launcher.num_processes - 1:
        time.sleep(0.1)
    started: list[subprocess.Popen] = list(launcher.procs)
    for rank, process in enumerate(started, start=1):
        _in_background(_wait_for, rank, process, launcher, started, folder, patience)


def _wait_for(
    rank: int, process: subprocess.Popen, launcher: Any, started: list[subprocess.Popen], folder: Path, patience: float
) -> None:
    if (code := process.wait()) == 0:
        return
    launcher.procs.clear()  # what is not in this list Lightning does not look at
    time.sleep(patience)
    words = gone(f"rank {rank} {ending(code)}", folder)
    outcome = Outcome.read(folder) if (folder / FILE).is_file() else Outcome([])
    if outcome.status != "failed":  # else it has been said
        outcome.status, outcome.error = "failed", words
        log.error("%s", words)
        outcome.write(folder)
    for other in started:
        other.kill()
    _end()


def _wait_for_first(first: int, folder: Path, patience: float) -> None:
    while os.getppid() == first:
        time.sleep(1.0)
    time.sleep(patience)
    log.error("%s", gone("the first rank was killed", folder))
    _end()


def _wait_for_sweep(sweep: int, folder: Path) -> None:
    while os.getppid() == sweep:
        time.sleep(1.0)
    log.error("%s", f"The sweep that has started this job is gone. {going_on(folder)}".rstrip())
    _end()


def _end() -> None:
    """No ``sys.exit``: the main thread may wait for what never comes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
