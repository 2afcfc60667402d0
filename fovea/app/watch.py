"""Processes of one job that watch each other, where the first one has started the others.

A rank that is gone is noticed by the others in the next operation that they share: a training step later, or at the end
of an evaluation, or never while NCCL waits. Lightning looks after its processes, too, and kills them all without a word
of how to go on; so what it would look at is taken over.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig

from fovea.app.errors import gone
from fovea.app.outcome import FILE, Outcome

log = logging.getLogger("fovea")

#: Seconds in which the others may say by themselves what is wrong, before they are ended.
PATIENCE = 15.0
#: How Lightning calls the jobs of processes that it starts.
_STARTED = "train_ddp_process_"


class RanksWatched(L.Callback):
    """Watches the other processes of a training from the moment they are there; ``folder`` is that of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        watch(trainer.strategy.launcher, self.folder)


def watch(launcher: Any, folder: Path, patience: float = PATIENCE) -> None:
    """Ends this process, and with it the job in ``folder``, some seconds behind the end of a process that it needs.

    In the first one these are the ones that Lightning's ``launcher`` has started, in those the first one. A process
    that something else has started (torchrun, srun) watches nobody: who has started it does.
    """
    started: list[subprocess.Popen] = list(getattr(launcher, "procs", ()))
    for rank, process in enumerate(started, start=1):
        _in_background(_wait_for, rank, process, launcher, started, folder, patience)
    if HydraConfig.initialized() and str(HydraConfig.get().job.name).startswith(_STARTED):
        _in_background(_wait_for_first, os.getppid(), folder, patience)


def _in_background(wait: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=wait, args=arguments, daemon=True, name="watch").start()


def _wait_for(
    rank: int, process: subprocess.Popen, launcher: Any, started: list[subprocess.Popen], folder: Path, patience: float
) -> None:
    if (code := process.wait()) == 0:
        return
    launcher.procs.clear()  # what is not in this list Lightning does not look at
    time.sleep(patience)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    words = gone(f"rank {rank} {how}", folder)
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


def _end() -> None:
    """No ``sys.exit``: the main thread may wait for what never comes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
