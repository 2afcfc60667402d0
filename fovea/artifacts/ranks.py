"""Processes, on one host or many, that export into one folder: who is who, and that they agree on the shares."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from fovea.artifacts.errors import ArtifactError

logger = logging.getLogger(__name__)

#: Variables of rank and number of ranks, and of the rank on its host, as torchrun and SLURM's srun set them.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def rank_in(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks and rank on its host that a launcher gave this process; 0, 1, 0 without one.

    SLURM numbers the script of a job, too, and tells it how many tasks the job may have (``SLURM_NTASKS``); that many
    processes there are in a step of srun alone.

    Raises:
        ArtifactError: there is a rank and no number of them, or one of them is no number.
    """
    for rank, world_size, local in (_TORCHRUN, _SRUN):
        if rank in environment:
            if rank == _SRUN[0] and world_size not in environment:
                if (tasks := environment.get("SLURM_NTASKS", "1")) != "1":
                    logger.warning(
                        "this process works alone, not as one of the %s tasks of its SLURM job: srun starts as many",
                        tasks,
                    )
                continue
            try:
                return int(environment[rank]), int(environment[world_size]), int(environment.get(local, "0"))
            except (KeyError, ValueError) as error:
                raise ArtifactError(
                    f"{rank}={environment[rank]} is in the environment and {world_size} is "
                    f"{environment.get(world_size, 'not')}; set both, or give --rank and --world-size"
                ) from error
    return 0, 1, 0


@contextlib.contextmanager
def sole_writer(folder: Path, rank: int = 0) -> Iterator[IO[str]]:
    """Waits until no other process writes this rank's shards in ``folder``; gives the file that is locked.

    The lock ends with the process, or with the last one of those that it hands the open file to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".lock-{rank:02d}").open("w") as lock:
        if not _taken(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            logger.warning("another process exports to %s; waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@contextlib.contextmanager
def shared_by(folder: Path, world_size: int) -> Iterator[IO[str]]:
    """Waits until nobody exports to ``folder`` in another number of ranks: shares of both would overlap.

    Gives the file that is locked, see :func:`sole_writer`.
    """
    with (folder / ".lock-ranks").open("a+") as agreed:
        with exclusively(folder, ".lock-turn"):
            agreed.seek(0)
            if (found := agreed.read()) != str(world_size):
                if not _taken(agreed, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    logger.warning(
                        "%s ranks export to %s; waiting for them, as this is one of %d", found, folder, world_size
                    )
                    fcntl.flock(agreed, fcntl.LOCK_EX)
                agreed.truncate(0)
                agreed.write(str(world_size))
                agreed.flush()
            fcntl.flock(agreed, fcntl.LOCK_SH)
        yield agreed


@contextlib.contextmanager
def exclusively(folder: Path, name: str) -> Iterator[None]:
    """Waits for the lock ``name`` in ``folder``."""
    with (folder / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _taken(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how)
    except BlockingIOError:
        return False
    return True
