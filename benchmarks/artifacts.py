"""Size and reading rate of artifacts beside per-sample ``torch.save``: ``python benchmarks/artifacts.py``.

The sample is a conversation of T = 1,500 tokens with a target of width 3,584 (Qwen2.5-VL-7B), bf16: one picture of
756 x 756 pixels, which is 27 x 27 = 729 visual tokens of 28 pixels, and 225 supervised positions (its mean answer in
MMSpec has 222 tokens). What it is compared with keeps three full-length streams per sample (input embeddings, mid and
last states, 3 T rows) with ids and loss mask in one ``torch.save`` file, as scripts of the field do.

To *read* a sample is to have its tensors and to touch each of their bytes: every tensor that the way of reading
gives is summed as 64-bit integers. Rows of batches make a ``TeacherBatch`` of one sample first. All files are read
once before, so they come from the page cache. Each rate is the median over passes through the whole set, on one thread;
the ways take turns, so that other load on the machine meets all of them. The last column counts the processor time of
this process alone and so leaves out most of that load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.streaming import StreamedArtifacts
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample

TOKENS, WIDTH, VISUAL, SUPERVISED = 1_500, 3_584, 729, 225


def make_sample(number: int) -> TeacherSample:
    """A sample of the size above with random states."""
    generator = torch.Generator().manual_seed(number)

    def states(rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=generator).bfloat16()

    tokens = torch.arange(TOKENS)
    return TeacherSample(
        key=f"sample-{number}",
        ids=torch.randint(0, 150_000, (TOKENS,), generator=generator),
        positions=tokens.expand(3, -1),
        answer_mask=tokens >= TOKENS - SUPERVISED,
        is_visual=(tokens >= 20) & (tokens < 20 + VISUAL),
        last=states(TOKENS),
        mid=states(SUPERVISED),
        visual=states(VISUAL),
        grids=((27, 27),),
    )


def touch(tensors: Iterable[Tensor]) -> int:
    """Reads every byte."""
    total = 0
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        start = min(-flat.storage_offset() % 8, flat.numel())  # int64 views begin at a multiple of 8 bytes
        end = start + (flat.numel() - start) // 8 * 8
        total += int(flat[:start].sum()) + int(flat[start:end].view(torch.int64).sum()) + int(flat[end:].sum())
    return total


def tensors_of(item: TeacherSample | TeacherBatch) -> list[Tensor]:
    """The tensors of a sample or batch."""
    values = (getattr(item, entry.name) for entry in fields(item))
    return [value for value in values if isinstance(value, Tensor)]


def write(root: Path, samples: int) -> tuple[Path, list[Path]]:
    """The same samples as artifacts and as ``torch.save`` files of three streams."""
    folder, streams = root / "artifacts", root / "streams"
    streams.mkdir()
    fingerprint = Fingerprint("none", {}, "random", (1,), "bf16", "dataset")
    paths = []
    with ArtifactWriter(folder, fingerprint, dtype="bf16", shard_bytes=300_000_000) as writer:
        for number in range(samples):
            sample = make_sample(number)
            writer.write(sample, SampleMeta())
            extra = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            paths.append(streams / f"{number}.pt")
            three = {"input_embeds": extra[0].clone(), "mid_states": extra[1].clone(), "last_states": sample.last}
            torch.save({"input_ids": sample.ids, "loss_mask": sample.answer_mask, **three}, paths[-1])
    finish_rank(folder, fingerprint, {}, 0, 1)
    return folder, paths


def read_once(read: Callable[[], Iterator[list[Tensor]]]) -> tuple[float, float, float]:
    """Samples per second, megabytes per second, and samples per second of this process's own processor time."""
    wall, cpu, count, size = time.perf_counter(), time.process_time(), 0, 0
    for tensors in read():
        touch(tensors)
        count, size = count + 1, size + sum(t.numel() * t.element_size() for t in tensors)
    seconds, own = time.perf_counter() - wall, time.process_time() - cpu
    return count / seconds, size / seconds / 1e6, count / own


def main() -> None:
    """Prints sizes and rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=48, help="samples in the set; about 50 MB each on disk")
    parser.add_argument("--passes", type=int, default=7, help="passes whose median counts")
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    options = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder, paths = write(Path(root), options.samples)
        ours = sum(path.stat().st_size for path in folder.glob("shard-*.tar")) / options.samples
        theirs = sum(path.stat().st_size for path in paths) / options.samples
        print(f"T {TOKENS}, D {WIDTH}, {VISUAL} visual, {SUPERVISED} supervised, {options.samples} samples, bf16")
        print(f"bytes per sample: torch.save of three streams {theirs / 1e6:.2f} MB, artifacts {ours / 1e6:.2f} MB")
        print(f"share: {ours / theirs:.1%} (at most 60 % up to {round(0.8 * TOKENS)} visual + supervised rows)")

        artifacts = open_artifacts(folder)

        def indexed() -> Iterator[list[Tensor]]:
            return (tensors_of(artifacts[i]) for i in range(len(artifacts)))

        def freshly_mapped() -> Iterator[list[Tensor]]:
            mapped = open_artifacts(folder)
            return (tensors_of(mapped[i]) for i in range(len(mapped)))

        def indexed_batches() -> Iterator[list[Tensor]]:
            return (tensors_of(TeacherBatch.collate([artifacts[i]])) for i in range(len(artifacts)))

        def streamed_batches() -> Iterator[list[Tensor]]:
            return map(tensors_of, StreamedArtifacts(str(folder), batch_size=1, shuffle_buffer=0))

        def saved() -> Iterator[list[Tensor]]:
            return (list(torch.load(path, weights_only=True).values()) for path in paths)

        ways = {
            "indexed, mapped before": indexed,
            "indexed, mapped anew each pass": freshly_mapped,
            "indexed, batches of 1": indexed_batches,
            "streaming, batches of 1": streamed_batches,
            "torch.load of three streams": saved,
        }
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(options.passes + 1):
            for name, read in ways.items():
                result = read_once(read)
                if number:  # the first pass brings everything into memory
                    results[name].append(result)
        print(f"\n{'read, every byte touched':32} {'samples/s':>10} {'MB/s':>8} {'samples/CPU s':>14}")
        for name, passes in results.items():
            samples, megabytes, own = (statistics.median(column) for column in zip(*passes, strict=True))
            print(f"{name:32} {samples:10.0f} {megabytes:8.0f} {own:14.0f}")
        print(f"\n{os.cpu_count()} cores, one thread, torch {torch.__version__}, medians of {options.passes} passes")


if __name__ == "__main__":
    main()
