"""Peak memory and time of the chunked objective against the naive one, forward and backward, side by side.

    python benchmarks/losses.py

Memory: every contender runs in a process of its own. When its inputs are made, it resets its resident high-water mark
(``VmHWM``, by /proc/self/clear_refs; so Linux alone) to what is resident then, and reads it again after one forward and
backward pass; the difference is what the objective needed. Time: both run in turn in one process, after a warm-up, and
the medians are compared.

The naive objective is the same formulas over full logits, by autograd.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.training.objective import ObjectiveConfig, objective, row_weights


def inputs(args: argparse.Namespace) -> dict[str, Tensor]:
    """Draft rows whose states are near their teachers', ``share`` rows to a teacher position."""
    generator = torch.Generator().manual_seed(0)
    positions = -(-args.rows // args.share)
    index = torch.arange(args.rows) // args.share
    teacher = torch.randn(positions, args.hidden, generator=generator)

    def near(states: Tensor) -> Tensor:
        return (states + 0.5 * torch.randn(states.shape, generator=generator)).requires_grad_()

    teacher_mid = torch.randn(positions, args.hidden, generator=generator)
    return {
        "h_hat": near(teacher[index]),
        "h_mid": near(teacher_mid[index]),
        "step": torch.arange(args.rows) % args.share + 1,
        "teacher_index": index,
        "teacher": teacher,
        "teacher_mid": teacher_mid,
        "lm_head_weight": torch.randn(args.vocabulary, args.hidden, generator=generator).mul_(4 * args.hidden**-0.5),
    }


def chunked(x: dict[str, Tensor], config: ObjectiveConfig) -> Tensor:
    """Ours."""
    return objective(**x, config=config).loss_sum


def naive(x: dict[str, Tensor], config: ObjectiveConfig) -> Tensor:
    """The formulas over full logits."""
    index, weights = x["teacher_index"], row_weights(x["step"], config.gamma_w)
    logits = F.linear(x["h_hat"], x["lm_head_weight"])
    with torch.no_grad():
        teacher_logits = F.linear(x["teacher"], x["lm_head_weight"])[index]
        choice = teacher_logits.argmax(-1, keepdim=True)
    log_q = logits.log_softmax(-1)
    kl = F.kl_div(log_q, teacher_logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    ce = F.nll_loss(log_q, choice[:, 0], reduction="none")
    competitor = logits.scatter(1, choice, -torch.inf).topk(config.candidates).values[:, -1]
    gap = logits.gather(1, choice)[:, 0] - competitor
    hid = (x["h_hat"] - x["teacher"][index]).square().mean(-1)
    mid = (x["h_mid"] - x["teacher_mid"][index]).square().mean(-1)
    rows = (
        config.lambda_hid * (config.beta_h * hid + config.beta_mid * mid)
        + config.lambda_kl * kl
        + config.lambda_tok * (config.beta_ce * ce + config.beta_cmp * F.softplus(config.margin - gap))
    )
    return (weights * rows).sum()


CONTENDERS: dict[str, Callable[[dict[str, Tensor], ObjectiveConfig], Tensor]] = {"chunked": chunked, "naive": naive}


def high_water_mib() -> float:
    """Most resident memory that this process ever had, MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_memory(args: argparse.Namespace) -> float:
    """MiB that one forward and backward pass adds to the high-water mark; in a fresh process."""
    x = inputs(args)
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mib()
    CONTENDERS[args.memory_of](x, ObjectiveConfig(chunk_rows=args.chunk_rows)).backward()
    return high_water_mib() - before


def memory_of(name: str) -> float:
    """:func:`measure_memory` of one contender."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    # Freed blocks go straight back to the system, so that the mark counts live tensors and not malloc's reserve.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure_times(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per forward and backward pass, contenders taking turns."""
    x, config = inputs(args), ObjectiveConfig(chunk_rows=args.chunk_rows)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(args.repeats + 1):
        for name, loss in CONTENDERS.items():
            x["h_hat"].grad = x["h_mid"].grad = None
            start = time.perf_counter()
            loss(x, config).backward()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--rows", type=int, default=256, help="supervised (anchor, step) rows")
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--share", type=int, default=1, help="rows that one teacher position teaches")
    parser.add_argument("--chunk-rows", type=int, default=ObjectiveConfig().chunk_rows)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure_memory(args))
        return
    print(
        f"V = {args.vocabulary:,}, {args.rows} rows, {args.share} per teacher position, hidden {args.hidden}, "
        f"float32, chunks of {args.chunk_rows} rows, {torch.get_num_threads()} threads"
    )
    memory = {name: memory_of(name) for name in CONTENDERS}
    seconds = {name: statistics.median(times) for name, times in measure_times(args).items()}
    print(f"{'':10}{'peak MiB':>10}{'median s':>10}")
    for name in CONTENDERS:
        print(f"{name:10}{memory[name]:10.0f}{seconds[name]:10.3f}")
    print(f"{'ratio':10}{memory['chunked'] / memory['naive']:10.3f}{seconds['chunked'] / seconds['naive']:10.3f}")


if __name__ == "__main__":
    main()
