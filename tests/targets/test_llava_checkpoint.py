"""Checkpoints in the layout of the LLaVA code base: every tensor arrives, and it makes a target like any other."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, CLIPImageProcessor

from fovea.files import DiskFullError
from fovea.targets.checkpoint import CheckpointError
from fovea.targets.conversation import Conversation
from fovea.targets.llava_checkpoint import convert, main
from fovea.targets.load import load_spec, load_target
from fovea.targets.spec import UnsupportedTargetError
from fovea.targets.tiny.tokenizer import train_tokenizer

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def original(one: Any, tokenizer: Any, folder: Path, *, with_tower: bool, **changes: Any) -> tuple[Path, Path]:
    """The checkpoint of ``one`` as the LLaVA code base would write it, and its vision tower as CLIP's."""
    model, text = one.model, one.model.config.text_config
    tiled = hasattr(model.config, "image_grid_pinpoints")
    config = {field: getattr(text, field) for field in FIELDS} | {
        "architectures": ["LlavaMistralForCausalLM" if text.model_type == "mistral" else "LlavaLlamaForCausalLM"],
        "model_type": "llava_llama",
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_parameters["rope_theta"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_aspect_ratio": "anyres" if tiled else "pad",
        "mm_patch_merge_type": "spatial_unpad" if tiled else "flat",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    }
    if tiled:
        config["image_grid_pinpoints"] = model.config.image_grid_pinpoints
    tensors, tower = {}, {}
    for name, tensor in model.state_dict().items():
        rows = tensor[: len(tokenizer)] if "embed_tokens" in name or "lm_head" in name else tensor
        if name.startswith("model.vision_tower."):
            inner = name.removeprefix("model.vision_tower.").removeprefix("vision_model.")
            tower[f"vision_model.{inner}"] = tensor.clone()
        else:
            for new, old in ((".language_model", ""), ("multi_modal_projector.linear_", "mm_projector.")):
                name = name.replace(new, old)
            tensors[name.replace("projector.1.", "projector.0.")] = rows.clone()
    source, clip = folder / "source", folder / "clip"
    for place in (source, clip):
        place.mkdir()
    if with_tower:
        tensors |= {f"model.vision_tower.vision_tower.{name}": tensor for name, tensor in tower.items()}
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps(config | changes))
    tokenizer.save_pretrained(source)
    save_file(tower | {"text_model.x": torch.zeros(1)}, clip / "model.safetensors")
    (clip / "config.json").write_text(json.dumps({"vision_config": model.config.vision_config.to_dict()}))
    return source, clip


@pytest.mark.parametrize(
    ("name", "with_tower"), [("llava_next_vicuna", True), ("llava_next_mistral", False), ("llava15", False)]
)
def test_every_tensor_arrives(twin, llama_tokenizer, tmp_path, name, with_tower) -> None:
    one, tokenizer = twin(name), llama_tokenizer(plain=True)
    source, clip = original(one, tokenizer, tmp_path, with_tower=with_tower)
    # The tower's sizes are CLIP-L's unless its folder says otherwise; these are small.
    convert(source, tmp_path / "new", clip)
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "new", dtype=torch.float32).state_dict()
    theirs = one.model.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if "embed_tokens" in key or "lm_head" in key:
            known, mean = tensor[: len(tokenizer)], tensor[: len(tokenizer)].mean(0)
            assert torch.equal(ours[key][: len(tokenizer)], known)
            assert ours[key].shape[0] % 64 == 0
            torch.testing.assert_close(ours[key][len(tokenizer) :], mean.expand(ours[key].shape[0] - len(known), -1))
        else:
            assert torch.equal(ours[key], tensor), key


def test_the_outcome_is_a_target_that_asks_as_the_code_base_does(twin, llama_tokenizer, tmp_path) -> None:
    source, clip = original(twin("llava_next_vicuna"), llama_tokenizer(plain=True), tmp_path, with_tower=False)
    with pytest.raises(UnsupportedTargetError, match=r"layout of the LLaVA code base.*python -m fovea.targets"):
        load_spec(source)
    convert(source, tmp_path / "new", clip)
    target = load_target(tmp_path / "new")
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": "the red square"},
        {"role": "user", "content": "and the circle?"},
    ]
    encoded = target.encode(Conversation("x", turns, (Image.new("RGB", (60, 40)),)))
    text = target.tokenizer.decode(encoded.ids[~encoded.is_visual])
    assert text.startswith("<s> A chat between a curious user")
    assert text.endswith("USER: \nwhat is it? ASSISTANT: the red square</s>USER: and the circle? ASSISTANT:")
    assert target.tokenizer.decode(encoded.ids[encoded.answer_mask]) == "the red square</s>"
    _, prefill = target.prefill(encoded, 2)
    assert prefill.visual.shape[0] == int(encoded.is_visual.sum()) > 16


#: A system message, two pictures in one turn, an answer, and a turn without a picture.
LONG = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what differs?"}]},
    {"role": "assistant", "content": "the circle"},
    {"role": "user", "content": "and the square?"},
]


@pytest.mark.parametrize(
    ("name", "turns", "text"),
    [
        (
            "llava15",
            LONG,
            "be brief USER: <image>\n<image>\nwhat differs? ASSISTANT: the circle</s>USER: and the square? ASSISTANT:",
        ),
        (
            "llava_next_mistral",
            LONG,
            "[INST] <<SYS>>\nbe brief\n<</SYS>>\n\n<image>\n<image>\nwhat differs? [/INST] the circle</s>"
            "[INST] and the square? [/INST]",
        ),
        (
            "llava_next_mistral",
            LONG[1:],
            "[INST] <image>\n<image>\nwhat differs? [/INST] the circle</s>[INST] and the square? [/INST]",
        ),
    ],
)
def test_turns_are_written_as_the_code_base_writes_them(twin, llama_tokenizer, tmp_path, name, turns, text) -> None:
    """Its conversations "v1" and "mistral_instruct"; both pictures are found again, in their order."""
    source, clip = original(twin(name), llama_tokenizer(plain=True), tmp_path, with_tower=False)
    convert(source, tmp_path / "new", clip)
    target = load_target(tmp_path / "new")
    pictures = (Image.new("RGB", (60, 40)), Image.new("RGB", (40, 60)))
    encoded = target.encode(Conversation("x", turns, pictures))
    assert [view.image for view in encoded.views] == sorted(view.image for view in encoded.views)
    assert {view.image for view in encoded.views} == {0, 1}
    parts = [m | {"content": target_parts(m["content"])} for m in turns]
    assert target.processor.apply_chat_template(parts, add_generation_prompt=True) == text
    assert target.tokenizer.decode(encoded.ids[encoded.answer_mask]) == "the circle</s>"


def target_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_projector_type": "linear"}, "mm_projector_type is 'linear'"),
        ({"mm_patch_merge_type": "flat"}, "mm_patch_merge_type is 'flat'"),
        ({"mm_vision_select_feature": "cls_patch"}, "mm_vision_select_feature is 'cls_patch'"),
        ({"architectures": ["LlavaMptForCausalLM"]}, "architectures is 'LlavaMptForCausalLM'"),
        (
            {"image_aspect_ratio": "anyres_max_9"},
            "image_aspect_ratio is 'anyres_max_9', .*; take a checkpoint .* with anyres or pad or square",
        ),
    ],
)
def test_what_transformers_cannot_express_is_refused(twin, llama_tokenizer, tmp_path, changes, message) -> None:
    source, clip = original(
        twin("llava_next_vicuna"), llama_tokenizer(plain=True), tmp_path, with_tower=False, **changes
    )
    with pytest.raises(UnsupportedTargetError, match=message):
        convert(source, tmp_path / "new", clip)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("aspect", ["square", None, "pad"])
def test_pictures_are_brought_to_squares_as_the_code_base_does_it(twin, llama_tokenizer, tmp_path, aspect) -> None:
    """Cut to the square in their middle unless they were padded in training; in its code CLIP's processor does it."""
    changes = {"image_aspect_ratio": aspect}
    source, clip = original(twin("llava15"), llama_tokenizer(plain=True), tmp_path, with_tower=False, **changes)
    convert(source, tmp_path / "new", clip)
    side = 28
    cut_out = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    wide = Image.linear_gradient("L").convert("RGB").resize((90, 40))
    theirs = cut_out(wide, return_tensors="pt")["pixel_values"]
    ours = load_target(tmp_path / "new").read_images([wide]).vision["pixel_values"]
    assert torch.equal(ours, theirs) == (aspect != "pad")


#: Another language model's way to ask: ChatML.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% for p in m['content'] %}"
    "{{ '<image>\\n' if p['type'] == 'image' else p['text'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_language_model_that_is_asked_in_other_words_is_not_asked_in_vicunas(twin, tmp_path) -> None:
    """Its tokenizer's own template knows no pictures; one that does is taken."""
    tokenizer = train_tokenizer(["what is in the picture", "the red square and the blue circle"], 300)
    assert (tokenizer.eos_token, "<image>" in tokenizer.chat_template) == ("<|im_end|>", False)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    source, clip = original(twin("llava_next_vicuna"), tokenizer, tmp_path, with_tower=False, **ids)
    with pytest.raises(UnsupportedTargetError, match=r"source' ends answers with '<\|im_end\|>', so .*template\.jinja"):
        convert(source, tmp_path / "new", clip)
    assert not (tmp_path / "new").exists()
    (source / "chat_template.jinja").write_text(CHATML)
    convert(source, tmp_path / "new", clip)
    target = load_target(tmp_path / "new")
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
    encoded = target.encode(Conversation("x", turns, (Image.new("RGB", (60, 40)),)))
    text = target.tokenizer.decode(encoded.ids[~encoded.is_visual])
    assert text == "<|im_start|>user\n\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"


def as_sentencepiece(folder: Path, tokenizer: Any) -> None:
    """The files of a plain Llama ``tokenizer`` as the code base publishes them: tokenizer.model in the place of
    tokenizer.json."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        piece = model.pieces.add()
        piece.piece, piece.score = token, -float(number)
        piece.type = kinds.get(token, 6 if token.startswith("<0x") else 1)
    model.trainer_spec.vocab_size = len(model.pieces)
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True, "legacy": False}))


def test_the_published_tokenizer_file_is_read(twin, llama_tokenizer, tmp_path) -> None:
    """They hold tokenizer.model alone: its ids are those of the same vocabulary in tokenizer.json."""
    pytest.importorskip("sentencepiece")
    tokenizer = llama_tokenizer(plain=True)
    source, clip = original(twin("llava_next_vicuna"), tokenizer, tmp_path, with_tower=False)
    convert(source, tmp_path / "from json", clip)
    as_sentencepiece(source, tokenizer)
    convert(source, tmp_path / "from model", clip)
    turns = [{"role": "user", "content": "what is the red square, ünd?"}, {"role": "assistant", "content": "a circle"}]
    read = [load_target(tmp_path / name).encode(Conversation("x", turns)) for name in ("from json", "from model")]
    assert read[0].ids.tolist() == read[1].ids.tolist()
    assert read[0].answer_mask.tolist() == read[1].answer_mask.tolist()


@pytest.mark.parametrize("package", ["sentencepiece", "protobuf"])
def test_a_missing_reader_of_the_tokenizer_is_named(twin, llama_tokenizer, tmp_path, monkeypatch, package) -> None:
    """Not tiktoken, of which transformers speaks."""
    source, clip = original(twin("llava_next_vicuna"), llama_tokenizer(plain=True), tmp_path, with_tower=False)
    for file in source.glob("*token*"):
        file.unlink()
    (source / "tokenizer.model").write_bytes(b"\n\x05\n")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    for name in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(f"fovea.targets.processor.is_{name}_available", lambda there=name != package: there)
    with pytest.raises(
        CheckpointError, match=rf"no tokenizer\.json, and {package}, which .*; run pip install {package}$"
    ):
        convert(source, tmp_path / "new", clip)
    assert not (tmp_path / "new").exists()


def test_a_missing_tower_is_named_before_anything_is_written(twin, llama_tokenizer, tmp_path) -> None:
    source, _ = original(twin("llava15"), llama_tokenizer(plain=True), tmp_path, with_tower=False)
    with pytest.raises(CheckpointError, match=r"no vision tower; name a copy of openai/clip.* with --vision-tower"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def damaged_config(source: Path, **changes: Any) -> None:
    theirs = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(
        json.dumps({name: value for name, value in theirs.items() if value is not None})
    )


def without(source: Path, *parts: str) -> None:
    """Takes tensors whose names hold one of ``parts`` out of the weights."""
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}
    torch.save(kept, source / "pytorch_model.bin")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s, c: cut(s / "config.json"), r"source/config\.json' is no whole JSON"),
        (lambda s, c: (s / "config.json").unlink(), r"source' has no config\.json; name a folder in the layout"),
        (lambda s, c: (s / "config.json").write_text("[1]"), r"source/config\.json' holds no JSON object"),
        (lambda s, c: damaged_config(s, architectures=None), r"config\.json' lacks architectures; fetch"),
        (lambda s, c: damaged_config(s, image_grid_pinpoints=None), r"config\.json' lacks image_grid_pinpoints"),
        (lambda s, c: cut(s / "pytorch_model.bin"), r"pytorch_model\.bin' is cut off"),
        (lambda s, c: (s / "pytorch_model.bin").unlink(), r"source' holds no weights"),
        (lambda s, c: torch.save({"model.x": Path("/")}, s / "pytorch_model.bin"), r"model\.bin' would run code"),
        (
            lambda s, c: torch.save({"encoder.x": torch.ones(1)}, s / "pytorch_model.bin"),
            r"holds 'encoder\.x', which is",
        ),
        (lambda s, c: without(s, "mm_projector"), r"source' holds no tensors of multi_modal_projector; complete"),
        (lambda s, c: without(s, "model.layers."), r"source' holds no tensors of language_model\.model\.layers"),
        (
            lambda s, c: [file.unlink() for file in s.glob("*token*")],
            r"source' holds no processor or tokenizer that can",
        ),
        (lambda s, c: cut(c / "model.safetensors"), r"clip/model\.safetensors' is cut off"),
        (lambda s, c: cut(c / "config.json"), r"clip/config\.json' is no whole JSON"),
        (
            lambda s, c: (c / "config.json").unlink(),
            r"clip' has no config\.json; --vision-tower is the folder of a CLIP",
        ),
    ],
)
def test_a_damaged_source_is_named_before_anything_is_written(
    twin, llama_tokenizer, tmp_path, capsys, spoil, message
) -> None:
    """On the command line, in one sentence and with exit code 1."""
    source, clip = original(twin("llava_next_vicuna"), llama_tokenizer(plain=True), tmp_path, with_tower=False)
    spoil(source, clip)
    with pytest.raises(SystemExit) as ended:
        main([str(source), str(tmp_path / "new"), "--vision-tower", str(clip)])
    assert re.match(rf"error: '.*{message}", str(ended.value.code))
    assert "\n" not in str(ended.value.code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip", "source"]


def test_a_conversion_that_fails_leaves_nothing_and_one_that_is_done_is_kept(
    twin, llama_tokenizer, tmp_path, monkeypatch
) -> None:
    source, clip = original(twin("llava15"), llama_tokenizer(plain=True), tmp_path, with_tower=False)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("fovea.targets.llava_checkpoint.save_file", full)
        with pytest.raises(DiskFullError, match=r"no room for .*new"):
            convert(source, tmp_path / "new", clip)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip", "source"]
    convert(source, tmp_path / "new", clip)
    with pytest.raises(FileExistsError, match=r"new' exists; name a new folder"):
        convert(source, tmp_path / "new", clip)
