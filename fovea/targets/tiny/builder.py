"""Builds a small target once and keeps it in a cache."""

from __future__ import annotations

import hashlib
import json
import logging
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
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from fovea.targets.published import published
from fovea.targets.tiny import training
from fovea.targets.tiny.accuracy import FamilyAccuracy, measure, require_reading
from fovea.targets.tiny.alphabet import learn_alphabet
from fovea.targets.tiny.architecture import Architecture
from fovea.targets.tiny.batches import Encoder
from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.families import FAMILIES, Pictures, sample_scene
from fovea.targets.tiny.llava import Llava15, LlavaNext
from fovea.targets.tiny.qwen25vl import Qwen25VL
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, train_tokenizer

log = logging.getLogger(__name__)

ARCHITECTURES: dict[str, Architecture] = {"qwen25vl": Qwen25VL(), "llava_next": LlavaNext(), "llava15": Llava15()}

#: Raised whenever the pictures, the questions or the training change, so that caches are not mistaken for them.
RECIPE_VERSION = 2
#: Scenes of each family whose texts the tokenizer learns from.
_CORPUS_SCENES = 300
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "pillow")


def build(config: TinyConfig, cache: Path, *, device: torch.device | str | None = None, show: bool = True) -> Path:
    """The checkpoint folder of the target, from ``cache`` or trained now (about five minutes on two cores).

    The folder appears under its name only when it is whole. It is a checkpoint that transformers loads as any other of
    its architecture, with ``accuracy.json`` beside it.

    Args:
        config: of the target; with library versions and kind of device it makes the folder's name.
        cache: folder of caches.
        device: where to train; None takes a GPU if there is one.
        show: progress, in bars on a terminal and in lines elsewhere.

    Raises:
        UnreadablePicturesError: if the target did not learn to read its pictures; nothing is kept.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = cache / "targets" / f"tiny-{config.architecture}-{cache_key(config, place)}"
    return published(folder, lambda draft: _write(config, draft, place, show))


def cache_key(config: TinyConfig, device: torch.device) -> str:
    """Twelve hex digits of all that decides what is built of an architecture."""
    recipe = {
        "config": {name: value for name, value in asdict(config).items() if name != "architecture"},
        "recipe": RECIPE_VERSION,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "device": device.type,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _write(config: TinyConfig, folder: Path, device: torch.device, show: bool) -> None:
    started = time.perf_counter()
    architecture = ARCHITECTURES[config.architecture]
    corpus = _corpus(config.seed, architecture.pictures)
    tokenizer = train_tokenizer(corpus, config.vocab_size, architecture.special_tokens, architecture.template)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = _train(architecture, config, tokenizer, device, show)
    encoder = Encoder(tokenizer, architecture.reader(config, tokenizer))
    report = measure(model, encoder, architecture.pictures, config.judged_questions, device)
    require_reading(report, config.min_gain)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(eos_token_id=ids[IM_END], pad_token_id=ids[END_OF_TEXT], do_sample=False)
    _moved(model, torch.device("cpu")).save_pretrained(folder)
    architecture.processor(config, tokenizer).save_pretrained(folder)
    _write_report(folder / "accuracy.json", report, time.perf_counter() - started)


def _train(
    architecture: Architecture, config: TinyConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device, show: bool
) -> PreTrainedModel:
    rng = np.random.default_rng(config.seed)
    encoder = Encoder(tokenizer, architecture.reader(config, tokenizer))
    stages = training.STAGES[architecture.pictures]
    with _progress(show) as stage:
        model = _moved(architecture.new_model(config, tokenizer, config.shallow_layers), device)
        learn_alphabet(
            architecture,
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
            ("learning to read", stages.reading, config.reading_steps, 1.0, 1.0),
            ("small pictures", stages.small, config.small_steps, 0.5, 1.0),
            ("all pictures", stages.mixed, config.mixed_steps, 0.5, 1.0),
            ("all layers", stages.mixed, config.deep_steps, 0.25, 0.5),
        ):
            if name == "all layers":
                model = _moved(architecture.grow(model, config, tokenizer), device)
            training.train(
                architecture,
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


def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """``model``, moved to ``device``; transformers wraps ``to`` so that to a type checker it is no method."""
    nn.Module.to(model, device)
    return model


@contextmanager
def _progress(show: bool) -> Iterator:
    """Gives a function that opens a bar for a stage and returns what the stage reports its losses to.

    Where nobody sees bars, as in a log file, each stage is a line when it begins.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.2f}"), disable=not show) as bars:

        def stage(description: str, steps: int) -> training.Report:
            if show and not bars.console.is_terminal:
                log.info("%s, %d steps", description, steps)
            task = bars.add_task(description, total=steps, loss=float("nan"))
            return lambda loss: bars.update(task, advance=1, loss=loss)

        yield stage


def _corpus(seed: int, pictures: Pictures = "grids") -> list[str]:
    """What the tokenizer learns from: questions, answers, and the roles of the chat template."""
    rng = np.random.default_rng(seed)
    texts = ["user", "assistant"] * _CORPUS_SCENES
    for sampler in FAMILIES[pictures].values():
        for _ in range(_CORPUS_SCENES):
            for turn in sample_scene(sampler, "train", rng).turns(rng):
                texts += [turn.question, turn.answer]
    return texts


def _write_report(path: Path, report: dict[str, FamilyAccuracy], seconds: float) -> None:
    record = {"families": {name: asdict(f) for name, f in report.items()}, "build_seconds": round(seconds, 1)}
    path.write_text(json.dumps(record, indent=2) + "\n")
