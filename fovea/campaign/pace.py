"""How far a campaign is, and how long the rest will take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median


class Pace:
    """Seconds that are left: what is expected of each kind of job, times what its jobs have taken so far for theirs.

    That is the median of them: the first one also makes what all need, such as the target, and a resumed one has less
    to do.
    """

    def __init__(self) -> None:
        self.total = self.finished = 0
        self._left: dict[str, float] = defaultdict(float)
        self._ratios: dict[str, list[float]] = defaultdict(list)

    @property
    def left(self) -> int:
        """Jobs to do."""
        return self.total - self.finished

    def add(self, kind: str, expected: Sequence[float]) -> None:
        """Jobs of a ``kind``, and the seconds ``expected`` of each."""
        self.total += len(expected)
        self._left[kind] += sum(expected)

    def done(self, kind: str, expected: float, taken: float) -> None:
        """One of them is done, in so many seconds."""
        self.finished += 1
        self._left[kind] = max(0.0, self._left[kind] - expected)
        if expected:
            self._ratios[kind].append(taken / expected)

    def remaining(self) -> float:
        """Seconds that the rest will take; of a kind that none was done of, as expected."""
        return sum(left * median(self._ratios.get(kind) or [1.0]) for kind, left in self._left.items())

    def place(self) -> str:
        """Number of the next job, of all."""
        return f"{min(self.finished + 1, self.total)}/{self.total}"


def minutes(seconds: float) -> str:
    """A duration to come, in words."""
    return "about a minute left" if seconds < 90 else f"about {seconds / 60:.0f} minutes left"
