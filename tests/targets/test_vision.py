"""What a target sees with, loaded alone: the whole target's visual tokens, from vision tower and projector only."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from datamodules.artifacts import ArtifactDataModule
from datamodules.conversations import ConversationSource
from datamodules.loading import LoaderConfig
from fovea.artifacts.config import ExportConfig
from fovea.targets.checkpoint import CheckpointError, load_sight
from fovea.targets.images import BrokenImageError, encoded_picture
from fovea.targets.load import load_head
from fovea.targets.spec import UnsupportedTargetError
from fovea.targets.vision import PictureReader, load_vision

FAMILIES = ["qwen25vl", "llava15", "llava_next_mistral"]


def tensors(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def old_names(name: str) -> str:
    """As the hub's copies of Qwen2.5-VL and LLaVA-1.5 call them."""
    name = name.replace("model.visual.", "visual.").replace("model.vision_tower.", "vision_tower.")
    name = name.replace("model.multi_modal_projector.", "multi_modal_projector.")
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return name


@pytest.mark.parametrize("name", FAMILIES)
def test_it_sees_what_the_whole_target_sees(twin, small_conversations, name):
    target, folder = twin(name).target, twin(name).folder
    alone, reader = load_vision(folder, device="cpu", dtype=torch.float32), PictureReader(folder)
    assert len(alone.model.get_decoder().layers) == 0
    for conversation in small_conversations:
        encoded = target.encode(conversation)
        vision = reader.read(conversation.key, [tensors(encoded_picture(image)) for image in conversation.images])
        assert vision.keys() == encoded.vision.keys()
        if vision:
            assert torch.equal(alone.visual_tokens(vision), target.read_visual([encoded]))


@pytest.mark.parametrize("name", ["qwen25vl", "llava15"])
def test_names_of_older_checkpoints(twin, small_conversations, tmp_path, name):
    folder = Path(shutil.copytree(twin(name).folder, tmp_path / name))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {old_names(key): t for key, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    encoded = twin(name).target.encode(small_conversations[0])
    alone = load_vision(folder, device="cpu", dtype=torch.float32)
    assert torch.equal(alone.visual_tokens(encoded.vision), twin(name).target.read_visual([encoded]))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_its_own_tensors_are_read(twin, name):
    folder = twin(name).folder
    sight = load_sight(folder)
    head = load_head(folder, dtype=torch.float32)
    layers = sum(t.numel() for key, t in load_file(folder / "model.safetensors").items() if ".layers." in key)
    everything = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    towers = sum(t.numel() for key, t in sight.items() if ".layers." in key)
    heads = head.embedding.numel() + head.norm_weight.numel() + head.lm_head_weight.numel()
    assert sum(t.numel() for t in sight.values()) == everything - heads - (layers - towers)


def test_a_checkpoint_without_a_whole_tower(twin, tmp_path):
    folder = Path(shutil.copytree(twin("qwen25vl").folder, tmp_path / "cut"))
    weights = load_file(folder / "model.safetensors")
    cut = {key: t for key, t in weights.items() if "merger" not in key}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors of its vision tower and projector, .*merger"):
        load_vision(folder, device="cpu", dtype=torch.float32)


def test_a_target_that_reads_text_only(twin):
    with pytest.raises(UnsupportedTargetError, match=r"reads text only; export with visual=stored"):
        load_vision(twin("llama").folder, device="cpu", dtype=torch.float32)


def test_a_reader_travels_as_a_path(twin, small_conversations):
    reader = PictureReader(twin("llava15").folder)
    picture = tensors(encoded_picture(small_conversations[0].images[0]))
    read = reader.read("k", [picture])
    assert len(pickle.dumps(reader)) < 1_000
    again = pickle.loads(pickle.dumps(reader)).read("k", [picture])
    assert torch.equal(again["pixel_values"], read["pixel_values"])
    assert reader.read("k", []) == {}
    with pytest.raises(BrokenImageError, match="image '1 of sample k' cannot be opened"):
        reader.read("k", [picture[:40]])


class Conversations(ConversationSource):
    def __init__(self, items):
        self.items = items

    def _read(self):
        return self.items

    def digest(self):
        return "in memory"


def batches(twin, conversations, root, **export):
    config = ExportConfig(**{"mid_layers": (1, 2), "dtype": "fp32", "answers": "dataset", "batch_size": 2} | export)
    data = ArtifactDataModule(
        checkpoint=twin.folder,
        export=config,
        load_target=lambda: twin.target,
        train=Conversations(conversations),
        root=root,
        loader=LoaderConfig(batch_size=3, val_fraction=0.0),
        progress=False,
    )
    data.prepare_data()
    data.setup()
    assert json.loads((data.folder_of(data.train_source) / "manifest.json").read_text())["skipped"].keys() == {"prompt"}
    return list(data.train_dataloader())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_is_that_of_stored_visual_tokens(twin, small_conversations, tmp_path, name, dtype):
    """In other batches than the export's. In bf16 a number may round to its neighbour; fp8 spares them its rounding."""
    stored = batches(twin(name), small_conversations, tmp_path, dtype="bf16" if dtype == "fp8" else dtype)
    again = batches(twin(name), small_conversations, tmp_path, dtype=dtype, visual="recomputed")
    assert len(stored) == len(again) == 3
    for one, other in zip(stored, again, strict=True):
        scale = one.visual.abs().max().item()
        assert other.visual.dtype == one.visual.dtype
        tolerance = {"atol": 1e-5 * scale, "rtol": 0.0 if dtype == "fp32" else 2**-7}
        torch.testing.assert_close(other.visual, one.visual, **tolerance)
        if dtype != "fp8":
            for part, expected in vars(replace(one, visual=other.visual)).items():
                found = getattr(other, part)
                assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
