"""LLaVA's own: which visual tokens a picture becomes, what they show, and checkpoints that do not fit together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaNextConfig, LlavaNextImageProcessor, LlavaNextProcessor
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.llava import Tiling
from fovea.targets.load import load_spec, load_target
from fovea.targets.spec import UnsupportedTargetError

SIZES = st.tuples(st.integers(1, 3000), st.integers(1, 3000))


def asking(*sizes: tuple[int, int]) -> Conversation:
    images = tuple(Image.new("RGB", size, "red") for size in sizes)
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": "what is it"}]
    return Conversation("sizes", [{"role": "user", "content": content}], images)


@pytest.fixture(scope="module")
def next_target(twin) -> Any:
    return twin("llava_next_vicuna").target


#: Those of the published checkpoints.
TILING = Tiling(24, 336, LlavaNextConfig().image_grid_pinpoints)


@pytest.fixture(scope="module")
def real_processor(llama_tokenizer) -> LlavaNextProcessor:
    size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return LlavaNextProcessor(
        LlavaNextImageProcessor(**size),
        llama_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@settings(deadline=None, max_examples=300)
@given(size=SIZES)
def test_counts_of_any_size_are_the_processors(real_processor: LlavaNextProcessor, size: tuple[int, int]) -> None:
    (rows, columns), _ = TILING.kept(*size)
    counted = real_processor._get_num_multimodal_tokens(image_sizes=[size[::-1]]).num_image_tokens
    assert [576 + rows * (columns + 1)] == counted
    tiles = TILING.tiles(*size)
    assert 1 + tiles[0] * tiles[1] == image_size_to_num_patches(size[::-1], TILING.resolutions, 336)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((400, 50), 870),
        ((336, 336), 1176),
        ((500, 333), 1464),
        ((750, 1000), 2352),
        ((672, 672), 2928),
        ((2000, 1), 576),
        ((1, 2000), 600),
    ],
)
def test_counts_of_known_sizes(size: tuple[int, int], tokens: int) -> None:
    """576 + h (w + 1): the counts of the FOVEA paper's Table 4; a sliver loses all rows or columns of its tiles."""
    (rows, columns), _ = TILING.kept(*size)
    assert 576 + rows * (columns + 1) == tokens


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=3))
def test_features_equal_the_models_for_odd_sizes(twin, next_target, sizes) -> None:
    """As many as the prompt has places, the same as the eager model's, conversation by conversation and in a batch."""
    one = twin("llava_next_vicuna")
    conversation = asking(*sizes)
    encoded, inputs = next_target.encode(conversation), one.inputs(conversation)
    assert encoded.ids.tolist() == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        features = one.model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output
    visual = next_target.read_visual([encoded])
    assert visual.shape[0] == sum(rows * columns for rows, columns in encoded.grids) == int(encoded.is_visual.sum())
    torch.testing.assert_close(visual, torch.cat(list(features)), atol=1e-4, rtol=1e-4)
    other = next_target.encode(asking((90, 40)))
    both = next_target.read_visual([other, encoded])
    torch.testing.assert_close(both[-len(visual) :], visual, atol=1e-4, rtol=1e-4)


def test_a_grid_lies_over_the_part_of_the_picture_that_it_shows(next_target) -> None:
    """The cell that a bright spot moves most is, by grid and box, one that the spot covers; rows 2 x 2 tiles of 4."""
    spot = (63, 42, 84, 56)
    pixels = np.zeros((56, 84, 3), dtype=np.uint8)
    dark = Image.fromarray(pixels)
    pixels[spot[1] : spot[3], spot[0] : spot[2]] = 255
    content = [{"type": "image"}, {"type": "text", "text": "where"}]
    conversation = Conversation("x", [{"role": "user", "content": content}], (dark,))
    before = next_target.encode(conversation)
    after = next_target.encode(replace(conversation, images=(Image.fromarray(pixels),)))
    (embed,) = (m for name, m in next_target.model.named_modules() if name.endswith("embeddings.patch_embedding"))
    with torch.no_grad():
        moved = (embed(after.vision["pixel_values"]) - embed(before.vision["pixel_values"])).abs().sum(1)
    assert after.grids == ((4, 4), (6, 9))
    tiles = moved[1:].view(2, 2, 4, 4).transpose(1, 2).reshape(8, 8)
    for grid, view in zip((moved[0], tiles[1:7]), after.views, strict=True):
        row, column = divmod(int(grid.argmax()), grid.shape[1])
        left, top, right, bottom = view.box
        x = (left + (column + 0.5) / grid.shape[1] * (right - left)) * 84
        y = (top + (row + 0.5) / grid.shape[0] * (bottom - top)) * 56
        assert spot[0] < x < spot[2]
        assert spot[1] < y < spot[3]
    assert after.views[1].box == pytest.approx((0.0, -0.0625, 1.0, 1.0625))


@pytest.mark.parametrize(
    ("size", "options", "box"),
    [
        ((80, 40), {}, (0.25, 0.0, 0.75, 1.0)),
        ((40, 80), {}, (0.0, 0.25, 1.0, 0.75)),
        ((80, 40), {"do_pad": True}, (0.0, -0.5, 1.0, 1.5)),
        ((80, 40), {"do_center_crop": False, "size": {"height": 28, "width": 28}}, (0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_a_square_shows_the_middle_or_the_padded_or_the_squeezed_picture(twin, tmp_path, size, options, box) -> None:
    folder = Path(shutil.copytree(twin("llava15").folder, tmp_path / "target"))
    kind = "LlavaImageProcessor" if "do_pad" in options else "CLIPImageProcessor"
    edit_processor(folder, image_processor_type=kind, **options)
    encoded = load_target(folder).encode(asking(size))
    assert encoded.grids == ((4, 4),)
    assert encoded.views[0].box == box


def edit_processor(folder: Path, **changes: Any) -> None:
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= changes
    file.write_text(json.dumps(config))


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_kept_class_token_is_a_grid_of_its_own(twin, tmp_path) -> None:
    folder = Path(shutil.copytree(twin("llava15").folder, tmp_path / "target"))
    edit(folder, vision_feature_select_strategy="full")
    target = load_target(folder)
    encoded = target.encode(asking((40, 40), (28, 28)))
    assert encoded.grids == ((1, 1), (4, 4)) * 2
    assert [view.image for view in encoded.views] == [0, 0, 1, 1]
    _, prefill = target.prefill(encoded, 1)
    assert prefill.visual.shape[0] == 34


def test_fields_that_an_old_processor_lacks_come_from_the_model(twin) -> None:
    for name in ("llava15", "llava_next_vicuna"):
        one = twin(name)
        stored = json.loads((one.folder / "processor_config.json").read_text())
        assert stored.get("patch_size") is None
        processor = one.target.processor
        assert (processor.patch_size, processor.num_additional_image_tokens) == (7, 1)
        assert processor.vision_feature_select_strategy == "default"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llava_next_vicuna", {"vision_feature_select_strategy": "full"}, "cannot put tiles together"),
        ("llava15", {"vision_config": {"model_type": "pixtral"}}, "sees with a pixtral"),
        ("llava15", {"vision_config": {"model_type": "siglip_vision_model"}}, "drops the first token.*set it to full"),
        ("llava_next_mistral", {"text_config": {"model_type": "mistral", "sliding_window": 64}}, "sliding_window=null"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_the_weights(twin, tmp_path, name, changes, message) -> None:
    for file in ("config.json", "generation_config.json"):
        shutil.copy(twin(name).folder / file, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UnsupportedTargetError, match=message):
        load_spec(tmp_path)


def test_a_window_as_wide_as_the_context_is_no_window(twin, tmp_path) -> None:
    for file in ("config.json", "generation_config.json"):
        shutil.copy(twin("mistral").folder / file, tmp_path)
    edit(tmp_path, sliding_window=768)
    assert load_spec(tmp_path).max_positions == 768
    edit(tmp_path, sliding_window=767)
    with pytest.raises(UnsupportedTargetError, match="sliding_attention"):
        load_spec(tmp_path)


def test_a_processor_of_another_checkpoint_is_named(twin, tmp_path) -> None:
    folder = Path(shutil.copytree(twin("llava_next_vicuna").folder, tmp_path / "target"))
    edit_processor(folder, image_grid_pinpoints=[[28, 56], [84, 84]])
    with pytest.raises(ValueError, match=r"image_grid_pinpoints are .* make them the same"):
        load_target(folder)
    folder = Path(shutil.copytree(twin("llava15").folder, tmp_path / "other"))
    edit_processor(folder, crop_size={"height": 14, "width": 14})
    with pytest.raises(PromptError, match=r"'sizes': .*14x14 pixels and the vision tower takes 28"):
        load_target(folder).encode(asking((40, 40)))


def test_places_that_do_not_match_the_features_are_named(next_target) -> None:
    encoded = next_target.encode(asking((40, 40)))
    encoded.is_visual[int(encoded.is_visual.nonzero()[0])] = False
    with pytest.raises(ValueError, match=r"'sizes' make (\d+) visual tokens, and the prompt has \d+ places"):
        next_target.prefill(encoded, 1)


def test_a_legacy_checkpoint_without_a_template_is_refused(twin, tmp_path) -> None:
    folder = Path(shutil.copytree(twin("llava15").folder, tmp_path / "target"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(PromptError, match=r"no chat template; add chat_template\.jinja"):
        load_target(folder)


def test_half_precision_reaches_the_vision_tower(twin) -> None:
    target = load_target(twin("llava_next_vicuna").folder, dtype=torch.bfloat16)
    _, prefill = target.prefill(target.encode(asking((50, 70))), 2)
    assert {prefill.visual.dtype, prefill.hidden.dtype} == {torch.bfloat16}
    assert torch.isfinite(prefill.hidden).all()
