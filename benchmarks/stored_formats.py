"""Bytes of a sample in every stored format, and what the formats do to tau.

    python benchmarks/stored_formats.py             # bytes, in seconds
    python benchmarks/stored_formats.py --tau       # trains FOVEA on the embedded default once per format

Samples have the sizes of ``conf/model``: a picture of 640 x 480 pixels, 100 tokens of questions and 225 of answers.
Their states are random, their picture is a JPEG of 1/f noise, which has the spectrum of photographs; every sample is
written into a shard, and what counts is what the shard grows by. They stand beside three full streams per sample, the
input embedding, a mid state and the last state of every token in bf16 with ids and loss mask, in one ``torch.save``
file, as scripts of the field keep them.

``--tau`` runs ``train.py experiment=fovea seed=1`` for bf16, fp8, and bf16 with recomputed visual tokens; everything
else is equal, and each ends with its evaluation on the same prompts. What is finished is not done again; --anew forgets
it. Arguments that are not listed below go to train.py.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fovea.app.launch import CONFIG_DIR
from fovea.app.outcome import FILE, Outcome
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.schema import SampleMeta, StoredDtype
from fovea.artifacts.writer import ArtifactWriter
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.results import ALL, SpeedResult
from fovea.evaluation.table import markdown_table
from fovea.targets.teacher_batch import TeacherSample

ROOT = Path(__file__).resolve().parents[1]
#: Targets whose samples are weighed, by their files in conf/model.
MODELS = ("qwen25vl", "llava_next_vicuna_7b")
FORMATS: tuple[tuple[StoredDtype, str], ...] = (
    ("bf16", "stored"),
    ("fp8", "stored"),
    ("bf16", "recomputed"),
    ("fp8", "recomputed"),
)
#: The formats that --tau trains on.
TRAINED = FORMATS[:3]


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of its typical sample, from ``conf/model``."""

    tokens: int
    visual: int
    answer: int
    width: int
    axes: int
    vocabulary: int

    @staticmethod
    def of(model: str) -> Shape:
        """Those of ``conf/model/<model>.yaml``."""
        node = OmegaConf.load(CONFIG_DIR / "model" / f"{model}.yaml")
        sizes, sample = node.architecture, node.sample
        return Shape(
            sample.tokens, sample.visual_tokens, sample.answer_tokens, sizes.hidden_size, sizes.rotary_axes,
            sizes.vocab_size,
        )  # fmt: skip

    def sample(self, number: int, pictures: tuple[Tensor, ...] | None = None) -> TeacherSample:
        """A sample of random states; with ``pictures`` for its visual tokens, if there are any."""
        generator = torch.Generator().manual_seed(number)

        def states(rows: int) -> Tensor:
            return torch.randn(rows, self.width, generator=generator).bfloat16()

        place = torch.arange(self.tokens)
        return TeacherSample(
            key=f"sample-{number}",
            ids=torch.randint(self.vocabulary, (self.tokens,), generator=generator),
            positions=place.expand(self.axes, -1),
            answer_mask=place >= self.tokens - self.answer,
            is_visual=(place >= 20) & (place < 20 + self.visual),
            last=states(self.tokens),
            mid=states(self.answer),
            visual=states(self.visual),
            importance=torch.rand(self.visual, generator=generator),
            pictures=pictures,
        )


def photograph(seed: int, width: int = 640, height: int = 480) -> Tensor:
    """[bytes] uint8 a JPEG of quality 90, of noise whose amplitudes fall as 1/f, as those of photographs do."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(draw.standard_normal((3, height, width))) / frequency
    grey = np.fft.irfft2(spectrum, (height, width))
    # Colours of photographs differ little from channel to channel.
    pixels = grey[:1] + 0.2 * grey[1:2] * np.array([1.0, 0.0, -1.0])[:, None, None]
    pixels = np.clip(128 + 55 * pixels / pixels.std(), 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(content, "JPEG", quality=90)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def weigh(shape: Shape, dtype: StoredDtype, visual: str, samples: int) -> float:
    """Bytes per sample in a shard."""
    fingerprint = Fingerprint("none", {}, "random", (1,), dtype, "dataset", visual=visual)
    with tempfile.TemporaryDirectory() as root:
        with ArtifactWriter(Path(root), fingerprint, dtype=dtype, shard_bytes=1 << 40) as writer:
            for number in range(samples):
                pictures = (photograph(number),) if visual == "recomputed" else None
                meta = SampleMeta("random", ((640, 480),), ("0123456789abcdef",))
                writer.write(shape.sample(number, pictures), meta)
        return sum(path.stat().st_size for path in Path(root).glob("*.tar")) / samples


def weigh_streams(shape: Shape) -> int:
    """Bytes of three full streams of a sample in ``torch.save``."""
    sample, content = shape.sample(0), io.BytesIO()
    streams = {name: torch.randn_like(sample.last) for name in ("input_embeds", "mid_states")}
    torch.save(
        {"input_ids": sample.ids, "loss_mask": sample.answer_mask, "last_states": sample.last, **streams}, content
    )
    return len(content.getvalue())


def bytes_table(samples: int) -> list[list[str]]:
    """Format, and for each target megabytes and the share of three full streams."""
    shapes = [Shape.of(model) for model in MODELS]
    theirs = [weigh_streams(shape) for shape in shapes]
    rows = [["format", *(cell for model in MODELS for cell in (model, "share"))]]
    rows.append(
        ["three full streams, bf16", *(cell for size in theirs for cell in (f"{size / 1e6:.2f} MB", "100.0 %"))]
    )
    for dtype, visual in FORMATS:
        sizes = [weigh(shape, dtype, visual, samples) for shape in shapes]
        shares = zip(sizes, theirs, strict=True)
        rows.append([f"{dtype}, {visual}", *(c for s, t in shares for c in (f"{s / 1e6:.2f} MB", f"{s / t:.1%}"))])
    return rows


def train(out: Path, overrides: list[str]) -> list[list[str]]:
    """A run per format, and a table of what they come to."""
    rows = [["format", "tau", "95 % interval", "accepted drafts", "accepted by depth 1 to 4", "exact"]]
    for dtype, visual in TRAINED:
        folder = out / f"{dtype}-{visual}"
        if not (folder / FILE).is_file() or Outcome.read(folder).status != "completed":
            shutil.rmtree(folder, ignore_errors=True)
            own = ["experiment=fovea", "seed=1", f"data.export.dtype={dtype}", f"data.export.visual={visual}"]
            words = [*own, "logger=csv", f"hydra.run.dir={folder}", *overrides]
            print(f"== train.py {' '.join(words)}", flush=True)
            code = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], check=False).returncode
            if code:
                sys.exit(f"train.py ended with {code}; the same command goes on behind what is finished")
        figures = SpeedResult.load(folder / EVALUATIONS / FINAL).figures()[ALL]
        low, high = figures["intervals"].get("tau") or (float("nan"), float("nan"))
        reach = " ".join(f"{rate:.2f}" for rate in figures["reach_rate"][:4])
        rows.append(
            [
                f"{dtype}, {visual}",
                f"{figures['tau']:.3f}",
                f"{low:.2f} to {high:.2f}",
                f"{figures['accepted_drafts_per_round']:.3f}",
                reach,
                f"{figures['exact_matches']:.1%}",
            ]
        )
    return rows


def main() -> None:
    """Prints one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=int, default=4, help="samples that are weighed")
    add("--tau", action="store_true", help="train and evaluate on each format instead")
    add("--out", type=Path, default=Path("outputs/stored_formats"), help="folder of the trained runs")
    add("--anew", action="store_true", help="forget the runs that an earlier call finished")
    args, overrides = parser.parse_known_args()
    if strangers := [word for word in overrides if word.startswith("-") or "=" not in word or not args.tau]:
        parser.error(f"unknown arguments: {' '.join(strangers)}")
    if not args.tau:
        sizes = [len(photograph(number)) for number in range(args.samples)]
        print(markdown_table(bytes_table(args.samples)))
        print(f"\nThe picture takes {np.mean(sizes) / 1e3:.0f} kB on average; a photograph of COCO takes 163 kB.")
        return
    if args.anew:
        shutil.rmtree(args.out, ignore_errors=True)
    text = markdown_table(train(args.out.resolve(), overrides))
    (args.out / "stored_formats.md").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
