"""How fast the loader gives batches, beside the step that an H200 would train on them in.

    python benchmarks/loader.py [--workers 0 1 2] [--threads 1 2 4] [--dtype fp8]

Samples are those of ``benchmarks/stored_formats.py``: random states at the sizes of ``conf/model``, read through the
indexed door in random order and put together into batches of the target's recipe, as in training. Every byte is copied
into a batch, and nothing is done with it; it is compared with its checksum each time, or once, before the passes that
count. Workers are processes; threads are those of the process that trains. All shards are in the page cache: a set
larger than memory is read as fast as its disk or network is. Rates are medians over passes on this machine, whose cores
training and readers share; those per processor second leave out what else it does.

The step is computed, not measured: products of FOVEA's drafter forward and backward (weights three times, the frozen LM
head twice for drafts and once for the teacher) over all unrolled steps,

    6 P (T - 1 + R - A) + 6 P_m N + 6 P_c min(2, S) A + V D (4 R + 2 A)

with P weights of fusion and blocks, P_m of the memory's keys and values, P_c of query and correction; T tokens, A
anchors (answer tokens), N visual tokens, and R rows, the sum of A - s + 1 over S steps. Attention, a few per cent, is
left out. An H200 is taken to reach 40 % of its 989 TFLOP/s in bf16: the faster it is, the more the loader has to give.
The ratio is that of the rates, by the clock and by the processor time of training process and workers.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import torch
from stored_formats import MODELS, Shape
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.epochs import EpochLoader, EpochSampler
from fovea.app.launch import composed
from fovea.app.plan import find_architecture
from fovea.app.settings import read_settings
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.reading import CHECKSUMS, Checksums, open_artifacts
from fovea.artifacts.schema import STORED_DTYPES, SampleMeta
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.evaluation.table import markdown_table
from fovea.planning.plan import weightless_drafter
from fovea.targets.teacher_batch import TeacherBatch

#: FLOP/s that a step reaches: a share of what NVIDIA states for dense bf16.
REACHED = 0.4 * 989e12


@dataclass(frozen=True)
class Step:
    """Work of a training step per sample, and samples of a batch."""

    flops: float
    batch: int

    @property
    def seconds(self) -> float:
        """Per sample on the H200."""
        return self.flops / REACHED

    @staticmethod
    def of(model: str, shape: Shape) -> Step:
        """That of ``experiment=fovea`` for ``conf/model/<model>.yaml``; see the module's docstring."""
        cfg = composed("train", [f"model={model}", "experiment=fovea", "paths.output_dir=."])
        config = read_settings(cfg).drafter
        drafter = weightless_drafter(cfg.drafter.name, config, find_architecture(cfg.model, []))
        matrices = {
            name: p.numel() for name, p in drafter.named_parameters() if p.dim() == 2 and "embedding" not in name
        }
        memory = sum(n for name, n in matrices.items() if name.startswith(("correction.key", "correction.value")))
        correction = sum(n for name, n in matrices.items() if name.startswith("correction.")) - memory
        every = sum(matrices.values()) - memory - correction
        steps, anchors = config.depth + 1, shape.answer
        rows = sum(anchors - step + 1 for step in range(1, steps + 1))
        flops = 6 * every * (shape.tokens - 1 + rows - anchors) + 6 * memory * shape.visual
        flops += 6 * correction * min(config.max_correction_depth + 1, steps) * anchors
        flops += shape.vocabulary * shape.width * (4 * rows + 2 * anchors)
        return Step(float(flops), cfg.data.loader.batch_size)


def write(root: Path, shape: Shape, dtype: str, samples: int) -> None:
    """Artifacts of ``samples`` random samples."""
    fingerprint = Fingerprint("none", {}, "random", (1,), dtype, "dataset")
    with ArtifactWriter(root, fingerprint, dtype=dtype, shard_bytes=300_000_000) as writer:  # pyright: ignore
        for number in range(samples):
            writer.write(shape.sample(number), SampleMeta())
    finish_rank(root, fingerprint, {}, 0, 1)


def rate(
    root: Path, batch: int, workers: int, threads: int, passes: int, checksums: Checksums
) -> tuple[float, float, float]:
    """Samples and megabytes per second, medians over ``passes`` behind a first one, and samples per processor second.

    The last one counts this process and its workers, and so leaves out what else the machine does.
    """
    rates, seen, own = [], 0, _processor_seconds()
    artifacts = open_artifacts(root, checksums=checksums)
    loader = EpochLoader(
        artifacts,
        sampler=EpochSampler(len(artifacts)),
        batches_done=lambda: 0,
        batch_size=batch,
        num_workers=workers,
        threads=threads,
        collate_fn=TeacherBatch.collate,
        persistent_workers=workers > 0,
    )
    for epoch in range(passes + 1):
        loader.sampler.set_epoch(epoch)
        start, count, size = time.perf_counter(), 0, 0
        for given in loader:
            count += len(given.keys)
            size += sum(part.nbytes for f in fields(given) if isinstance(part := getattr(given, f.name), Tensor))
        seconds = time.perf_counter() - start
        rates.append((count / seconds, size / seconds / 1e6))
        if len(rates) == 1 and not workers:
            seen, own = -count, _processor_seconds()
        seen += count
    del loader, given  # workers are counted when they have ended
    samples, megabytes = (statistics.median(column) for column in zip(*rates[1:], strict=True))
    return samples, megabytes, seen / (_processor_seconds() - own)


def _processor_seconds() -> float:
    kinds = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in kinds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="targets, by their files in conf/model")
    add(
        "--workers", type=int, nargs="+", default=[0, 1, 2], help="loader processes; 0 reads in the process that trains"
    )
    add("--threads", type=int, nargs="+", default=[1, 2], help="threads that read in the process that trains")
    add("--checksums", choices=CHECKSUMS, nargs="+", default=CHECKSUMS, help="when bytes are compared with theirs")
    add("--dtype", choices=STORED_DTYPES, default="bf16", help="stored dtype")
    add("--megabytes", type=int, default=600, help="size of the set")
    add("--passes", type=int, default=5, help="passes whose median counts")
    add("--folder", type=Path, help="where the temporary files go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        [
            "target",
            "readers",
            "checksums",
            "samples/s",
            "MB/s",
            "samples/CPU s",
            "step on an H200",
            "samples/s there",
            "ratio",
            "by CPU time",
        ]
    ]
    for model in args.models:
        shape = Shape.of(model)
        step = Step.of(model, shape)
        size = (shape.tokens + shape.answer + shape.visual) * shape.width * 2
        samples = max(4 * step.batch, round(args.megabytes * 1e6 / size))
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            write(Path(root), shape, args.dtype, samples)
            readers = [(f"{n} workers" if n else "none", n, 0) for n in args.workers]
            readers += [(f"{n} threads", 0, n) for n in args.threads]
            for checksums, (name, workers, threads) in product(args.checksums, readers):
                found, megabytes, own = rate(Path(root), step.batch, workers, threads, args.passes, checksums)
                ratio = found * step.seconds
                per_step = f"{step.batch} x {step.seconds * 1e3:.1f} ms ({step.flops / 1e12:.2f} TFLOP)"
                there = [per_step, f"{1 / step.seconds:.0f}", f"{ratio:.1f}", f"{own * step.seconds:.1f}"]
                rows.append([model, name, checksums, f"{found:.0f}", f"{megabytes:,.0f}", f"{own:.0f}", *there])
    print(markdown_table(rows))
    print(f"\n{args.dtype}, page cache warm, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
