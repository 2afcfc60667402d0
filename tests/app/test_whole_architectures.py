"""The whole job behind every architecture: export, an epoch, both loops, and its drafter evaluated once more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fovea.evaluation.results import SpeedResult
from tests.app.conftest import run

#: Presets of ``conf/model``: the small checkpoint that takes the place of the published one, and its architecture.
PRESETS = {
    "llava15_7b": ("llava15", "LlavaForConditionalGeneration"),
    "llava_next_vicuna_7b": ("llava_next_vicuna", "LlavaNextForConditionalGeneration"),
    "llava_next_mistral_7b": ("llava_next_mistral", "LlavaNextForConditionalGeneration"),
    "causal_lm": ("qwen2", "Qwen2ForCausalLM"),
    "smollm2": ("llama", "LlamaForCausalLM"),
}
TEXT_ONLY = {"causal_lm", "smollm2"}
PROMPTS = 4


@pytest.fixture(scope="module")
def sweeps(small_checkpoint, tmp_path_factory) -> tuple[Path, Path]:
    """A sweep that trained beside every preset, and one that evaluated its drafters."""
    folder = tmp_path_factory.mktemp("whole_architectures")
    for preset, (name, _) in PRESETS.items():
        (folder / preset).mkdir()
        (folder / preset / "target").symlink_to(small_checkpoint(name))
        write_conversations(folder / preset, sees=preset not in TEXT_ONLY)
    trained = run(
        "train.py",
        folder,
        "-m",
        f"model={','.join(PRESETS)}",
        "model.path=${model.name}/target",
        "model.mid_layers=[1,2]",
        "model.drafter_blocks=1",
        "model.correction_width=16",
        "data=jsonl",
        "data.path=${model.name}/asked.jsonl",
        "data.heldout_path=${data.path}",
        "data.export.max_new_tokens=10",
        "data.export.dtype=fp32",
        "data.loader.num_workers=0",
        "data.loader.batch_size=1",
        "decode.max_new_tokens=10",
        f"speed.prompts={PROMPTS}",
        f"speed.transformers_prompts={PROMPTS}",
        "callbacks.speed_evaluation.every_n_epochs=2",
        "speed.warmup_prompts=0",
        "speed.resamples=0",
        "speed.trajectories=0",
        "scheduler=constant",
        "optimizer.lr=3e-3",
        "trainer.max_epochs=1",
        "trainer.accumulate_grad_batches=1",
        "trainer.devices=1",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.enable_progress_bar=false",
        "paths.cache=cache",
        "page=off",
        "logger=csv",
        "hydra.sweep.dir=trained",
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    runs = ",".join(f"trained/{job}" for job in range(len(PRESETS)))
    again = run("evaluate.py", folder, "-m", f"ckpt={runs}", "page=off", "logger=csv", "hydra.sweep.dir=again")
    assert again.returncode == 0, again.stdout + again.stderr
    return folder / "trained", folder / "again"


def write_conversations(folder: Path, *, sees: bool) -> None:
    """Twelve conversations; wide, tall and square pictures before and behind their questions, two in every fourth, and
    none where the target does not see."""
    words = ["what", "is", "in", "the", "picture", "red", "square", "and", "blue", "circle"]
    with (folder / "asked.jsonl").open("w") as stream:
        for number in range(12):
            shown = (1 + (number % 4 == 3)) * sees
            images = [f"{number}-{place}.png" for place in range(shown)]
            for place, image in enumerate(images):
                size = [(84, 56), (56, 98), (70, 70)][(number + place) % 3]
                drawn = Image.effect_mandelbrot(size, (-2 + number / 9, -1, 1, 1), 9 + place)
                drawn.convert("RGB").save(folder / image)
            parts: list[dict[str, Any]] = [{"type": "image"}] * shown
            question = " ".join(words[(3 * number + place) % len(words)] for place in range(2 + number))
            parts.insert(shown if number % 2 else 0, {"type": "text", "text": question})
            record = {"key": str(number), "messages": [{"role": "user", "content": parts}], "images": images}
            stream.write(json.dumps(record | {"source": "ab"[number % 2]}) + "\n")


def evaluations(sweeps: Sequence[Path], preset: str) -> list[SpeedResult]:
    job = str(list(PRESETS).index(preset))
    return [SpeedResult.load(sweep / job / "evaluation" / "final") for sweep in sweeps]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_answer_is_the_autoregressive_one(preset, sweeps):
    """And that of transformers' own generate; with drafts of which some are accepted and some are not."""
    for result in evaluations(sweeps, preset):
        assert len(result.prompts) == PROMPTS
        for prompt in result.prompts:
            assert prompt.transformers is not None
            assert prompt.speculative.tokens == prompt.autoregressive.tokens == prompt.transformers.tokens
        assert len({tuple(prompt.autoregressive.tokens) for prompt in result.prompts}) > PROMPTS // 2
        accepted = [r.accepted for prompt in result.prompts for r in prompt.speculative.rounds]
        assert min(accepted) == 0 < max(accepted)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_exported_drafter_drafts_as_the_trained_one(preset, sweeps):
    trained, again = evaluations(sweeps, preset)
    for before, after in zip(trained.prompts, again.prompts, strict=True):
        assert before.speculative.tokens == after.speculative.tokens
        assert [r.accepted for r in before.speculative.rounds] == [r.accepted for r in after.speculative.rounds]


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_presets_architecture_that_was_trained_beside(preset, sweeps):
    job = sweeps[0] / str(list(PRESETS).index(preset))
    target = json.loads((job / "drafter" / "config.json").read_text())["target"]
    assert target["architecture"] == PRESETS[preset][1]
    assert bool(target["placeholder_ids"]) == (preset not in TEXT_ONLY)
    checkpoint = torch.load(job / "checkpoints" / "last.ckpt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (0, 11)  # the twelfth is kept for validation
