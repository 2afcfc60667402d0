"""What a campaign consists of: drafters to train, and what is measured of them, in named stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """A drafter to train.

    Attributes:
        name: of its folder.
        experiments: trained one after another, each from the weights of the one before.
        overrides: of every one of them.
        measured: speed is measured after each epoch; otherwise the run only trains.
        seconds: what it takes on two CPU cores on the embedded default, about.
    """

    name: str
    experiments: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    measured: bool = False
    seconds: float = 60.0


@dataclass(frozen=True)
class Measurement:
    """A run of evaluate.py.

    Attributes:
        name: of its folder, in that of the stage.
        overrides: what is particular to it.
        training: the drafter that is measured; None for a method without weights.
        cost: seconds of a prompt on two CPU cores on the embedded default, about, the baseline's answer included.
    """

    name: str
    overrides: tuple[str, ...] = ()
    training: Training | None = None
    cost: float = 0.15


@dataclass(frozen=True)
class Stage:
    """Measurements that belong together, and are compared with each other.

    Attributes:
        name: of its folder.
        about: what it shows, in a phrase.
        measurements: in the order in which they are made.
        runs: trainings that themselves measure what the stage shows.
        prompts: conversations of each measurement; None takes all of the benchmark.
    """

    name: str
    about: str
    measurements: tuple[Measurement, ...] = ()
    runs: tuple[Training, ...] = ()
    prompts: int | None = None


def trainings_of(stages: Sequence[Stage]) -> list[Training]:
    """The drafters that ``stages`` need, each once, in the order in which they are needed."""
    needed = [training for s in stages for training in (*s.runs, *(m.training for m in s.measurements)) if training]
    return list(dict.fromkeys(needed))
