"""Checkpoints in the layout in which they are published load as those that transformers saves today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.targets.load import load_head, load_spec, load_target
from fovea.targets.vision import load_vision
from tests.targets.published_layouts import PUBLISHED, into_published_layout

#: Rotary base, end of the context and layers as published, where they are told apart from transformers' defaults.
READ = {
    "qwen25vl": (1e6, 128_000, 28),
    "qwen25vl_3b": (1e6, 128_000, 36),
    "llava15_7b": (1e4, 4096, 32),
    "llava15_13b": (1e4, 4096, 40),
    "llava_next_vicuna_7b": (1e4, 4096, 32),
    "llava_next_vicuna_13b": (1e4, 4096, 40),
    "llava_next_mistral_7b": (1e6, 32_768, 32),
}
SMALL = {
    "qwen25vl": "qwen25vl",
    "llava15_7b": "llava15",
    "llava_next_vicuna_7b": "llava_next_vicuna",
    "llava_next_mistral_7b": "llava_next_mistral",
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_published_configuration_is_read(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[preset]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    spec = load_spec(tmp_path)
    assert (spec.rope.theta, spec.max_positions, spec.num_layers) == READ[preset]
    assert spec.rope.mrope_section == ((16, 24, 24) if preset.startswith("qwen") else None)
    assert PUBLISHED[preset].get("image_token_id", 32_000) in spec.placeholder_ids


@pytest.fixture(params=SMALL)
def published(request: pytest.FixtureRequest, twin: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A twin, and the folder of its checkpoint in the published layout."""
    one = twin(SMALL[request.param])
    folder = Path(shutil.copytree(one.folder, tmp_path / "published"))
    into_published_layout(folder, request.param)
    return one, folder


def test_a_checkpoint_in_the_published_layout_is_the_same_target(
    published: tuple[Any, Path], small_conversations, caplog: pytest.LogCaptureFixture
) -> None:
    one, folder = published
    target = load_target(folder)
    assert not caplog.records  # of tensors without a place
    assert target.spec == one.target.spec
    for name, weight in one.target.model.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], weight), name
    for conversation in small_conversations:
        ours, theirs = (side.encode(conversation) for side in (target, one.target))
        assert torch.equal(ours.ids, theirs.ids)
        answers = [
            generate_autoregressive(side, encoded, max_new_tokens=6).tokens
            for side, encoded in ((target, ours), (one.target, theirs))
        ]
        assert answers[0] == answers[1]


def test_head_and_eyes_are_found_in_it(published: tuple[Any, Path], small_conversations) -> None:
    """What offline training loads instead of the whole target."""
    one, folder = published
    head = load_head(folder, dtype=torch.float32)
    for name in ("embedding", "lm_head_weight", "norm_weight"):
        assert torch.equal(getattr(head, name), getattr(one.target.head, name))
    seeing = load_vision(folder, device="cpu", dtype=torch.float32)
    encoded = one.target.encode(small_conversations[0])
    assert torch.equal(seeing.visual_tokens(encoded.vision), one.target.visual_tokens(encoded.vision))
