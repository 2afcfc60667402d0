"""The build: published whole or not at all, once, and only if it reads its pictures."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from fovea.targets.tiny import TinyConfig, build, builder
from fovea.targets.tiny.accuracy import FamilyAccuracy, UnreadablePicturesError, require_reading
from fovea.targets.tiny.architecture import grow, new_model
from fovea.targets.tiny.batches import Encoder
from fovea.targets.tiny.families import conversations
from fovea.targets.tiny.scenes import Turn
from fovea.targets.tiny.tokenizer import train_tokenizer

MICRO = TinyConfig(
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    shallow_layers=1,
    num_heads=1,
    vision_depth=1,
    vision_hidden_size=32,
    vision_intermediate_size=32,
    vision_heads=2,
    alphabet_steps=2,
    reading_steps=1,
    small_steps=1,
    mixed_steps=2,
    deep_steps=1,
    judged_questions=2,
    min_gain=-1.0,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return build(MICRO, cache, device="cpu", show=False)


def _train_again(*_):
    raise AssertionError("a cached target was trained again")


def test_micro_build_loads_through_transformers(folder):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert model.config.text_config.num_hidden_layers == 2
    prompt = conversations("heldout", 1, seed=1)[0]
    text = processor.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=list(prompt.images), return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=3)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    report = json.loads((folder / "accuracy.json").read_text())
    assert set(report["families"]["caption"]) == {"questions", "exact", "tokens", "wrong_picture"}


def test_cache_hit_does_no_work(folder, cache, monkeypatch):
    monkeypatch.setattr(builder, "_train", _train_again)
    assert build(MICRO, cache, device="cpu", show=False) == folder
    with pytest.raises(AssertionError):
        build(replace(MICRO, seed=1), cache, device="cpu", show=False)


def test_build_is_deterministic(folder, tmp_path):
    again = build(MICRO, tmp_path, device="cpu", show=False)
    assert again.name == folder.name
    for name in ("model.safetensors", "tokenizer.json", "config.json", "processor_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_build_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build(MICRO, tmp_path, device="cpu", show=False)
    assert torch.equal(torch.rand(1), expected)


def test_target_that_reads_nothing_is_refused(tmp_path):
    with pytest.raises(UnreadablePicturesError, match=r"min_gain=0\.3"):
        build(replace(MICRO, min_gain=0.3), tmp_path, device="cpu", show=False)
    assert not list((tmp_path / "targets").iterdir())


def test_interrupted_build_is_never_taken_for_whole(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder, "_write_report", interrupted)  # weights are written, the last file is not
        with pytest.raises(KeyboardInterrupt):
            build(MICRO, tmp_path, device="cpu", show=False)
    assert not list((tmp_path / "targets").glob("tiny-*"))
    assert (build(MICRO, tmp_path, device="cpu", show=False) / "accuracy.json").is_file()


def test_leftovers_of_a_killed_build_are_ignored(tmp_path):
    leftover = tmp_path / "targets" / ".building-dead" / "target"
    leftover.mkdir(parents=True)
    assert build(MICRO, tmp_path, device="cpu", show=False) != leftover


def test_gain_is_the_mean_over_families_with_pictures():
    report = {
        "colour": FamilyAccuracy(10, 0.9, 1.0, 0.1),
        "caption": FamilyAccuracy(10, 0.4, 1.0, 0.0),
        "text": FamilyAccuracy(10, 1.0, 1.0, None),
    }
    require_reading(report, 0.59)
    with pytest.raises(UnreadablePicturesError, match=r"gained 0.60 .* colour 0.90/0.10, caption 0.40/0.00"):
        require_reading(report, 0.61)


def test_grown_model_computes_what_the_shallow_one_computes():
    tokenizer = train_tokenizer(builder._corpus(0), 512)
    config = replace(MICRO, layers=4, shallow_layers=2)
    shallow = new_model(config, tokenizer, 2)
    with torch.no_grad():
        for parameter in shallow.model.language_model.layers.parameters():
            parameter.mul_(5)
    deep = grow(shallow, config, tokenizer)
    batch = Encoder(tokenizer).batch([((), [Turn("text", "Repeat KX7Q twice.", "KX7Q KX7Q")])])
    with torch.inference_mode():
        logits = [m.eval()(input_ids=batch.ids, position_ids=batch.positions).logits for m in (shallow, deep)]
    torch.testing.assert_close(logits[0], logits[1])
    assert len(deep.model.language_model.layers) == 4


def test_encoder_writes_what_the_processor_writes(folder):
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    encoder = Encoder(processor.tokenizer)
    for conversation in conversations("train", 10, seed=2):
        text = processor.apply_chat_template(conversation.messages, tokenize=False)
        expected = processor(text=[text], images=list(conversation.images) or None, return_tensors="pt")
        questions, answers = conversation.messages[::2], conversation.messages[1::2]
        turns = [Turn("", q["content"][-1]["text"], a["content"]) for q, a in zip(questions, answers, strict=True)]
        batch = encoder.batch([(conversation.images, turns)])
        assert torch.equal(batch.ids, expected["input_ids"])
        if batch.patches is None:
            continue
        torch.testing.assert_close(batch.patches.pixels, expected["pixel_values"])
        positions, _ = model.model.get_rope_index(
            expected["input_ids"],
            mm_token_type_ids=expected["mm_token_type_ids"],
            image_grid_thw=expected["image_grid_thw"],
        )
        assert torch.equal(batch.positions, positions)


def test_labels_are_the_answers(folder):
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    turns = [Turn("", "Read line 1.", "KX"), Turn("", "Read line 2.", "7Q")]
    batch = Encoder(tokenizer).batch([((), turns), ((), turns[:1])])
    supervised = [tokenizer.decode(row[row >= 0]) for row in batch.labels]
    assert supervised == ["KX<|im_end|>7Q<|im_end|>", "KX<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 15}, "multiple of shallow_layers"),
        ({"hidden_size": 100}, "head width"),
        ({"deep_steps": 0}, "deep_steps=0 must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TinyConfig(), **change)


def test_photographs_are_scaled_to_the_bound(folder):
    processor = AutoProcessor.from_pretrained(folder)
    photograph = np.zeros((1200, 900, 3), dtype=np.uint8)
    grid = processor.image_processor(images=[photograph], return_tensors="pt")["image_grid_thw"][0]
    assert 64 <= int(grid.prod()) // 4 <= MICRO.max_visual_tokens
