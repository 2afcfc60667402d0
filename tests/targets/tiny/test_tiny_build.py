"""The build: published whole or not at all, once, and only if it reads its pictures."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from fovea.targets.conversation import Conversation
from fovea.targets.load import load_target
from fovea.targets.tiny import TinyConfig, build, builder
from fovea.targets.tiny.accuracy import FamilyAccuracy, UnreadablePicturesError, require_reading
from fovea.targets.tiny.batches import Encoder
from fovea.targets.tiny.builder import ARCHITECTURES
from fovea.targets.tiny.families import FAMILIES, conversations
from fovea.targets.tiny.scenes import Turn
from fovea.targets.tiny.tokenizer import train_tokenizer
from fovea.targets.tiny.training import answer_logits

MICRO = TinyConfig(
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    shallow_layers=1,
    num_heads=1,
    vision_depth=2,
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


def micro(architecture: str) -> TinyConfig:
    own = {} if architecture == "qwen25vl" else {"rope_theta": 100.0}
    return replace(MICRO, architecture=architecture, **own)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def folder(cache, architecture):
    return build(micro(architecture), cache, device="cpu", show=False)


def _train_again(*_):
    raise AssertionError("a cached target was trained again")


def test_micro_build_loads_through_transformers(folder, architecture):
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    processor = AutoProcessor.from_pretrained(folder)
    assert model.config.text_config.num_hidden_layers == 2
    prompt = conversations("heldout", 1, 1, ARCHITECTURES[architecture].pictures)[0]
    text = processor.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=list(prompt.images), return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=3)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    report = json.loads((folder / "accuracy.json").read_text())
    assert set(report["families"]) == set(FAMILIES[ARCHITECTURES[architecture].pictures])
    assert set(report["families"]["caption"]) == {"questions", "exact", "tokens", "wrong_picture"}


def test_the_checkpoint_is_genuine(folder, architecture):
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [
        {
            "qwen25vl": "Qwen2_5_VLForConditionalGeneration",
            "llava_next": "LlavaNextForConditionalGeneration",
            "llava15": "LlavaForConditionalGeneration",
        }[architecture]
    ]
    if architecture != "qwen25vl":
        assert config.text_config.model_type == "llama"
        assert config.vision_config.model_type == "clip_vision_model"
        assert (config.vision_feature_layer, config.vision_feature_select_strategy) == (-2, "default")
    assert folder.name.startswith(f"tiny-{architecture}-")


def test_cache_hit_does_no_work(folder, architecture, cache, monkeypatch):
    config = micro(architecture)
    monkeypatch.setattr(builder, "_train", _train_again)
    assert build(config, cache, device="cpu", show=False) == folder
    with pytest.raises(AssertionError):
        build(replace(config, seed=1), cache, device="cpu", show=False)


def test_build_is_deterministic(folder, architecture, tmp_path):
    again = build(micro(architecture), tmp_path, device="cpu", show=False)
    assert again.name == folder.name
    for name in ("model.safetensors", "tokenizer.json", "config.json", "processor_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_tiles_are_cut_put_together_and_trimmed(cache):
    """The twin of LLaVA-NeXT is trained on what its adapter and transformers make of several shapes."""
    target = load_target(build(micro("llava_next"), cache, device="cpu", show=False))
    grids = {}
    banners = [c for c in conversations("train", 400, 0, "banners") if c.source in ("banner", "pair")]
    for conversation in banners:
        encoded = target.encode(conversation)
        for image, (rows, columns) in zip(conversation.images, encoded.grids[1::2], strict=True):
            cells = (image.height // 28, image.width // 28)
            assert (rows, columns) == (cells[0], cells[1] + 1), "every cell is seen, and every line ends"
            grids[cells] = encoded
    assert set(grids) == {(3, 3), (1, 6), (3, 6), (6, 3), (1, 9), (3, 9), (6, 1)}
    # One tile for boards, two or three for banners; a row of six is padded to three rows, and these are dropped.
    tiles = {cells: encoded.vision["pixel_values"].shape[0] - 1 for cells, encoded in grids.items()}
    assert (tiles[1, 6], tiles[6, 3], tiles[3, 9]) == (2, 2, 3)


def test_build_leaves_the_callers_random_numbers_alone_and_tells_a_log_file_its_stages(tmp_path, caplog):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    with caplog.at_level(logging.INFO):
        build(MICRO, tmp_path, device="cpu")
    assert torch.equal(torch.rand(1), expected)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("target: ")]
    assert told[0] == f"target: learning the alphabet, {MICRO.alphabet_steps} steps"
    assert len(told) == 5


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


def test_grown_model_computes_what_the_shallow_one_computes(architecture):
    kind = ARCHITECTURES[architecture]
    tokenizer = train_tokenizer(builder._corpus(0), 512, kind.special_tokens, kind.template)
    config = replace(micro(architecture), layers=4, shallow_layers=2)
    shallow = kind.new_model(config, tokenizer, 2)
    with torch.no_grad():
        for parameter in shallow.model.language_model.layers.parameters():
            parameter.mul_(5)
    deep = kind.grow(shallow, config, tokenizer)
    encoder = Encoder(tokenizer, kind.reader(config, tokenizer))
    batch = encoder.batch([((), [Turn("text", "Repeat KX7Q twice.", "KX7Q KX7Q")])])
    with torch.inference_mode():
        logits = [answer_logits(m.eval(), batch)[0] for m in (shallow, deep)]
    torch.testing.assert_close(logits[0], logits[1])
    assert len(deep.model.language_model.layers) == 4


def test_encoder_writes_what_the_processor_writes(folder, architecture):
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    encoder = encoder_of(folder, architecture)
    for conversation in conversations("train", 22, 2, ARCHITECTURES[architecture].pictures):
        text = processor.apply_chat_template(conversation.messages, tokenize=False)
        expected = processor(text=[text], images=list(conversation.images) or None, return_tensors="pt")
        questions, answers = conversation.messages[::2], conversation.messages[1::2]
        turns = [Turn("", q["content"][-1]["text"], a["content"]) for q, a in zip(questions, answers, strict=True)]
        batch = encoder.batch([(conversation.images, turns)])
        assert torch.equal(batch.ids, expected["input_ids"])
        for name, value in batch.vision.items():
            torch.testing.assert_close(value, expected[name])
        if architecture != "qwen25vl":
            assert torch.equal(batch.positions[0, 0], torch.arange(batch.ids.shape[1]))
        elif batch.vision:
            positions, _ = model.model.get_rope_index(
                expected["input_ids"],
                mm_token_type_ids=expected["mm_token_type_ids"],
                image_grid_thw=expected["image_grid_thw"],
            )
            assert torch.equal(batch.positions, positions)


def encoder_of(folder, architecture) -> Encoder:
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    return Encoder(tokenizer, ARCHITECTURES[architecture].reader(micro(architecture), tokenizer))


def test_visual_tokens_of_squares_are_those_of_the_whole_model(folder, architecture):
    """What learns the alphabet is what the model reads by."""
    kind = ARCHITECTURES[architecture]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    boards = [c.images[0] for c in conversations("train", 3, 0, kind.pictures)]
    with torch.inference_mode():
        cells = kind.cells(model, boards)
        features = model.get_image_features(**encoder_of(folder, architecture)._reader.vision(boards)).pooler_output
    for board, own in zip(boards, cells.split(9), strict=True):
        assert board.size == (84, 84)
        torch.testing.assert_close(features[boards.index(board)][:9], own, atol=1e-5, rtol=1e-5)


def test_labels_are_the_answers(folder, architecture):
    encoder = encoder_of(folder, architecture)
    turns = [Turn("", "Read line 1.", "KX"), Turn("", "Read line 2.", "7Q")]
    batch = encoder.batch([((), turns), ((), turns[:1])])
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
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


def test_photographs_are_scaled_to_what_the_tower_takes(folder, architecture):
    target = load_target(folder)
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1200, 900, 3), dtype=np.uint8))
    content = [{"type": "image"}, {"type": "text", "text": "Describe the picture."}]
    encoded = target.encode(Conversation("photograph", [{"role": "user", "content": content}], (photograph,)))
    assert 9 <= int(encoded.is_visual.sum()) <= MICRO.max_visual_tokens
