"""Seconds per optimizer step and peak memory of unrolled training, with all positions or the last ones supervised.

    OMP_NUM_THREADS=2 python benchmarks/training.py

One block, feature fusion, unrolled with correction off (text alone): the shape that EAGLE-3 trainers share. A step is
unroll, objective, backward, clipping and AdamW. Memory is measured in a process of its own: when model and batch are
made, it resets its resident high-water mark (``VmHWM``, by /proc/self/clear_refs; so Linux alone) to what is resident
then, and reads it again after two steps; the difference holds activations, gradients and optimizer state. Time is the
median of the steps after a warm-up. ``products`` is what the step's matrix products would take by themselves, at the
rate that a large product reaches on this machine at that moment.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.drafters.fovea import FoveaConfig, FoveaDrafter
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample, supervised_positions
from fovea.training.objective import ObjectiveConfig, objective
from fovea.training.unroll import unroll


def make_drafter(args: argparse.Namespace) -> FoveaDrafter:
    """An untrained drafter over a random head."""
    spec = TargetSpec(
        architecture="random",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=30,
        num_heads=args.hidden // 64,
        num_kv_heads=max(1, args.hidden // 192),
        head_dim=64,
        vocab_size=args.vocabulary,
        rms_norm_eps=1e-6,
        qkv_bias=False,
        rope=RopeSpec(10_000.0),
        max_positions=8192,
        eos_ids=(0,),
    )
    weight = torch.randn(args.vocabulary, args.hidden).mul_(args.hidden**-0.5)
    config = FoveaConfig(num_blocks=args.blocks, depth=args.steps - 1, max_correction_depth=-1)
    return FoveaDrafter(spec, config, TargetHead(weight, weight, torch.ones(args.hidden)))


def make_batch(args: argparse.Namespace, share: float) -> TeacherBatch:
    """One sample of random states, of which the last ``share`` of the tokens is an answer."""
    answer_mask = torch.arange(args.tokens) >= max(1, round(args.tokens * (1 - share)))
    sample = TeacherSample(
        key="random",
        ids=torch.randint(args.vocabulary, (args.tokens,)),
        positions=torch.arange(args.tokens)[None],
        answer_mask=answer_mask,
        is_visual=torch.zeros(args.tokens, dtype=torch.bool),
        last=torch.randn(args.tokens, args.hidden),
        mid=torch.randn(int(supervised_positions(answer_mask).sum()), args.hidden),
        visual=torch.zeros(0, args.hidden),
    )
    return TeacherBatch.collate([sample])


def make_step(args: argparse.Namespace, share: float) -> tuple[Callable[[], None], int, int]:
    """A function that trains one step, its supervised rows (anchor, step), and the tokens of the answer."""
    torch.manual_seed(0)
    drafter, batch, config = make_drafter(args), make_batch(args, share), ObjectiveConfig(chunk_rows=args.chunk_rows)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)

    def step() -> None:
        rows = unroll(drafter, batch, steps=args.steps)
        sums = objective(
            rows.h_hat,
            rows.h_mid,
            rows.step,
            rows.teacher_index,
            rows.teacher,
            rows.teacher_mid,
            drafter.head.lm_head_weight,
            config,
        )
        (sums.loss_sum / sums.Z).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    answer = int(batch.answer_mask.sum())
    return step, sum(max(0, answer - number) for number in range(1, args.steps + 1)), answer


def high_water_mib() -> float:
    """Most resident memory that this process ever had, MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_memory(args: argparse.Namespace) -> float:
    """MiB that two steps add to the high-water mark; in a fresh process."""
    step, _, _ = make_step(args, args.memory_of)
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mib()
    step()
    step()
    return high_water_mib() - before


def memory_of(share: float) -> float:
    """:func:`measure_memory` with ``share`` of the tokens supervised."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", str(share)]
    # Freed blocks go straight back to the system, so that the mark counts live tensors and not malloc's reserve.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def seconds_of(args: argparse.Namespace, share: float) -> tuple[float, float, int]:
    """Median seconds per step, those of its matrix products, and its supervised rows."""
    step, rows, answer = make_step(args, share)
    times = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), products_seconds(args, rows, answer), rows


def products_seconds(args: argparse.Namespace, rows: int, answer: int) -> float:
    """Seconds of the step's matrix products: LM head (draft both ways, teacher once) and drafter (three ways)."""
    states, weight = torch.randn(1024, args.hidden), torch.randn(args.vocabulary, args.hidden)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(states, weight.T)
        times.append(time.perf_counter() - start)
    per_operation = statistics.median(times) / (states.numel() * args.vocabulary)
    drafter = sum(p.numel() for p in make_drafter(args).parameters() if p.requires_grad and p.dim() == 2)
    # Step 1 runs every pair; the others run what is supervised.
    run = args.tokens - 1 + max(0, rows - (answer - 1))
    return per_operation * ((2 * rows + answer - 1) * weight.numel() + 3 * run * drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7, help="unrolled draft steps")
    parser.add_argument("--chunk-rows", type=int, default=256, help="rows whose logits are alive at once")
    parser.add_argument("--last", type=float, default=0.1, help="share of the tokens in the second measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure_memory(args))
        return
    print(
        f"hidden {args.hidden}, T = {args.tokens:,}, V = {args.vocabulary:,}, {args.blocks} block(s), "
        f"{args.steps} steps, batch 1, float32, chunks of {args.chunk_rows} rows, {torch.get_num_threads()} threads"
    )
    print(f"{'supervised':12}{'rows':>8}{'s per step':>12}{'products':>10}{'peak MiB above the model':>26}")
    seconds = []
    for share in (1.0, args.last):
        taken, products, rows = seconds_of(args, share)
        seconds.append(taken)
        print(f"{f'last {share:.0%}':12}{rows:8,}{taken:12.2f}{products:10.2f}{memory_of(share):26.0f}")
    print(f"ratio of the times: {seconds[1] / seconds[0]:.2f}")


if __name__ == "__main__":
    main()
