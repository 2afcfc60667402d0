"""Where in an epoch a training stands, in Lightning's counters and in the loader's: both must say the same."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import lightning as L
from torch.utils.data import DistributedSampler


@runtime_checkable
class Resumable(Protocol):
    """A loader that can begin within an epoch (see :mod:`datamodules.epochs`)."""

    @property
    def first_batch(self) -> int:
        """Number of the batch that the epoch begins with."""
        ...

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The ``epoch``, and what the loader needs to begin behind so many batches of it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begins there, when that epoch is run."""
        ...


def settle(checkpoint: dict[str, Any], batches: int, loader: Any) -> None:
    """Puts ``checkpoint`` at a place that Lightning resumes from as if it had never stopped.

    That is behind the first ``batches`` batches of the epoch, if a batch has been begun since: what gradients were
    being added up then is in no checkpoint. At the end of an epoch it is the beginning of the next one; but one that
    the last step of the training cut short goes on, if there is to be another step.
    """
    loops = checkpoint["loops"]["fit_loop"]
    epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    ended = epoch["current"]["processed"] == epoch["current"]["started"]
    too_far = batch["current"]["ready"] - batches
    if ended:
        # Lightning counts an epoch as processed, and as completed only when all callbacks have seen its end.
        for counters in (epoch["total"], epoch["current"]):
            if batch["is_last_batch"]:
                counters["completed"] = counters["processed"]
            else:
                counters["processed"] = counters["completed"]
    elif too_far > 0:
        for counters in (batch["total"], batch["current"]):
            counters.update(dict.fromkeys(counters, counters["ready"] - too_far))
        batch["is_last_batch"] = False
        if isinstance(loader, Resumable):
            loops["state_dict"]["combined_loader"] = [loader.state_dict(batches)]


def loader_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the training loader was, as Lightning keeps it; nothing if it cannot be told where to begin."""
    return checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])


def continue_epoch(trainer: L.Trainer, states: list[dict[str, Any]]) -> None:
    """Lets the training loader begin where ``states`` say, and counts the batches of the epoch as it deals them now.

    Lightning itself tells the loader only if nobody has asked for the length of the training before. And on another
    number of ranks, or with batches of another size, there are more or fewer batches to do than it believes.
    """
    loader, loop = trainer.train_dataloader, trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    if trainer.ckpt_path and epoch.ready == epoch.processed:
        loop.epoch_loop.restarting = False  # with max_steps, Lightning takes the epoch that has ended for a part of it
    if not isinstance(loader, Resumable) or not states:
        return
    loader.load_state_dict(states[0])
    batches = loop.epoch_loop.batch_progress
    if states[0].get("epoch") != epoch.processed or batches.is_last_batch:
        return
    # Lightning tells samplers the epoch only later.
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch.processed)
    change = loader.first_batch - batches.current.ready
    for counter in ("ready", "started", "processed", "completed"):
        setattr(batches.current, counter, getattr(batches.current, counter) + change)
