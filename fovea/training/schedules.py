"""Learning-rate schedules, counted in optimizer steps: warm-up to the peak rate, then linear decay to zero.

Both take the optimizer, the total number of optimizer steps, and the warm-up as a number of steps or as a share of
the total.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear(
    optimizer: Optimizer, *, total_steps: float, warmup_steps: int | None = None, warmup_ratio: float | None = None
) -> LambdaLR:
    """Linear warm-up and decay; update u (from 1) has the rate of counter u - 1, as torch and transformers count."""
    total, warmup = _lengths(total_steps, warmup_steps, warmup_ratio)
    return LambdaLR(optimizer, lambda counter: linear_factor(counter, warmup, total))


def deepspeed_log(
    optimizer: Optimizer, *, total_steps: float, warmup_steps: int | None = None, warmup_ratio: float | None = None
) -> LambdaLR:
    """Logarithmic warm-up, equal to DeepSpeed's WarmupDecayLR (minimum 0) update by update.

    Its counter starts at -1 and is advanced behind the update, so update u has the rate of counter u - 2 and the
    first two updates have rate 0.
    """
    total, warmup = _lengths(total_steps, warmup_steps, warmup_ratio)
    return LambdaLR(optimizer, lambda counter: log_factor(counter - 1, warmup, total))


#: What a schedule is to the training module: called with the optimizer and ``total_steps``.
ScheduleFactory = Callable[..., LambdaLR]


def linear_factor(counter: int, warmup: int, total: int) -> float:
    """Share of the peak rate at ``counter`` steps."""
    if counter < warmup:
        return counter / warmup
    return _decay(counter, warmup, total)


def log_factor(counter: int, warmup: int, total: int) -> float:
    """Share of the peak rate at ``counter`` steps; 0 before counter 0. A warm-up below 2 steps counts as 2."""
    warmup = max(2, warmup)
    if counter < warmup:
        return math.log(max(counter, 0) + 1) / math.log(warmup)
    return _decay(counter, warmup, total)


def _decay(counter: int, warmup: int, total: int) -> float:
    return max(0.0, (total - counter) / max(1, total - warmup))


def _lengths(total_steps: float, warmup_steps: int | None, warmup_ratio: float | None) -> tuple[int, int]:
    if not 0 < total_steps < math.inf:
        raise ValueError(
            "the number of optimizer steps is unknown, so the learning rate cannot decay over them; "
            "set trainer.max_steps, or trainer.max_epochs with data of known length"
        )
    total = int(total_steps)
    if warmup_ratio is None:
        warmup = warmup_steps
    elif not 0 <= warmup_ratio < 1:
        raise ValueError(f"scheduler.warmup_ratio is {warmup_ratio}; it is a share of all steps, in [0, 1)")
    else:
        warmup = round(total * warmup_ratio) if warmup_steps is None else None
    if warmup is None:
        raise ValueError("set either scheduler.warmup_steps or scheduler.warmup_ratio, and leave the other null")
    if not 0 <= warmup <= total:
        raise ValueError(
            f"scheduler.warmup_steps is {warmup} and training has {total} optimizer steps; "
            "shorten the warm-up or train longer"
        )
    return total, warmup
