"""Builds the embedded default target once and keeps it in a cache."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from fovea.targets.tiny import training
from fovea.targets.tiny.accuracy import FamilyAccuracy, measure, require_reading
from fovea.targets.tiny.alphabet import learn_alphabet
from fovea.targets.tiny.architecture import grow, new_model, processor
from fovea.targets.tiny.batches import Encoder
from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.families import FAMILIES, sample_scene
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, train_tokenizer

#: Raised whenever the pictures, the questions or the training change, so that caches are not mistaken for them.
RECIPE_VERSION = 2
#: Scenes of each family whose texts the tokenizer learns from.
_CORPUS_SCENES = 300
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "pillow")


def build(config: TinyConfig, cache: Path, *, device: torch.device | str | None = None, show: bool = True) -> Path:
    """The checkpoint folder of the target, from ``cache`` or trained now (about five minutes on two cores).

    The folder appears under its name only when it is whole. It is a Qwen2.5-VL checkpoint that transformers loads,
    with ``accuracy.json`` beside it.

    Args:
        config: of the target; with library versions and kind of device it makes the folder's name.
        cache: folder of caches.
        device: where to train; None takes a GPU if there is one.
        show: progress bars.

    Raises:
        UnreadablePicturesError: if the target did not learn to read its pictures; nothing is kept.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = cache / "targets" / f"tiny-qwen25vl-{cache_key(config, place)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as building:
        draft = Path(building) / "target"
        _write(config, draft, place, show)
        try:
            draft.rename(folder)
        except OSError:  # another process has published the same target meanwhile
            if not folder.is_dir():
                raise
    return folder


def cache_key(config: TinyConfig, device: torch.device) -> str:
    """Twelve hex digits of all that decides what is built."""
    recipe = {
        "config": asdict(config),
        "recipe": RECIPE_VERSION,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "device": device.type,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _write(config: TinyConfig, folder: Path, device: torch.device, show: bool) -> None:
    started = time.perf_counter()
    tokenizer = train_tokenizer(_corpus(config.seed), config.vocab_size)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = _train(config, tokenizer, device, show)
    report = measure(model, Encoder(tokenizer), config.judged_questions, device)
    require_reading(report, config.min_gain)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(eos_token_id=ids[IM_END], pad_token_id=ids[END_OF_TEXT], do_sample=False)
    _moved(model, torch.device("cpu")).save_pretrained(folder)
    processor(config, tokenizer).save_pretrained(folder)
    _write_report(folder / "accuracy.json", report, time.perf_counter() - started)


def _train(
    config: TinyConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device, show: bool
) -> Qwen2_5_VLForConditionalGeneration:
    rng = np.random.default_rng(config.seed)
    encoder = Encoder(tokenizer)
    with _progress(show) as stage:
        model = _moved(new_model(config, tokenizer, config.shallow_layers), device)
        learn_alphabet(
            model,
            tokenizer,
            steps=config.alphabet_steps,
            matrix_lr=config.alphabet_lr,
            other_lr=config.other_lr,
            rng=rng,
            device=device,
            report=stage("target: learning the alphabet", config.alphabet_steps),
        )
        for name, course, steps, matrix_share, other_share in (
            ("learning to read", training.READING, config.reading_steps, 1.0, 1.0),
            ("small pictures", training.SMALL, config.small_steps, 0.5, 1.0),
            ("all pictures", training.MIXED, config.mixed_steps, 0.5, 1.0),
            ("all layers", training.MIXED, config.deep_steps, 0.25, 0.5),
        ):
            if name == "all layers":
                model = _moved(grow(model, config, tokenizer), device)
            training.train(
                model,
                encoder,
                course,
                steps=steps,
                matrix_lr=matrix_share * config.matrix_lr,
                other_lr=other_share * config.other_lr,
                rng=rng,
                device=device,
                report=stage(f"target: {name}", steps),
            )
    return model


def _moved(model: Qwen2_5_VLForConditionalGeneration, device: torch.device) -> Qwen2_5_VLForConditionalGeneration:
    """``model``, moved to ``device``; transformers wraps ``to`` so that to a type checker it is no method."""
    nn.Module.to(model, device)
    return model


@contextmanager
def _progress(show: bool) -> Iterator:
    """Gives a function that opens a bar for a stage and returns what the stage reports its losses to."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.2f}"), disable=not show) as bars:

        def stage(description: str, steps: int) -> training.Report:
            task = bars.add_task(description, total=steps, loss=float("nan"))
            return lambda loss: bars.update(task, advance=1, loss=loss)

        yield stage


def _corpus(seed: int) -> list[str]:
    """What the tokenizer learns from: questions, answers, and the roles of the chat template."""
    rng = np.random.default_rng(seed)
    texts = ["user", "assistant"] * _CORPUS_SCENES
    for sampler in FAMILIES.values():
        for _ in range(_CORPUS_SCENES):
            for turn in sample_scene(sampler, "train", rng).turns(rng):
                texts += [turn.question, turn.answer]
    return texts


def _write_report(path: Path, report: dict[str, FamilyAccuracy], seconds: float) -> None:
    record = {"families": {name: asdict(f) for name, f in report.items()}, "build_seconds": round(seconds, 1)}
    path.write_text(json.dumps(record, indent=2) + "\n")
