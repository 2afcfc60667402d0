"""Brings a checkpoint of the LLaVA code base into the layout that transformers, and with it this project, loads.

    python -m fovea.targets.llava_checkpoint <folder> <new folder> [--vision-tower <folder>]

Open-LLaVA-NeXT and the first releases of LLaVA-1.5 and -1.6 are published in their own layout: a language model with a
vision tower among its tensors, or without one where the tower was never trained. Tensors are renamed and copied shard
by shard, so memory holds one shard. The vocabulary grows by an image token and a padding token; its new rows are the
mean of the old ones, so no new token can ever be the most probable one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlavaConfig,
    LlavaImageProcessor,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
)

from fovea.files import room_for
from fovea.targets.chat_template import PromptError
from fovea.targets.checkpoint import CheckpointError, damaged, read_settings, tensor_readers, weight_files
from fovea.targets.llava_templates import IMAGE, chat_template
from fovea.targets.processor import read_processor
from fovea.targets.spec import UnsupportedTargetError

#: Language model of each architecture of the code base.
LANGUAGE_MODELS = {"LlavaLlamaForCausalLM": "llama", "LlavaMistralForCausalLM": "mistral"}

# Tensors with a row per entry of the vocabulary, and what the number of rows is padded to a multiple of.
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_STEP = 64
_TEXT_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
)
#: Fields of their config.json without which nothing can be said of the checkpoint.
_NEEDED = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "mm_vision_select_layer")
_TOWER = "model.vision_tower.vision_tower."
_RENAMED = (
    (_TOWER, "vision_tower."),
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.image_newline", "image_newline"),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


def convert(source: Path, destination: Path, vision_tower: Path | None = None) -> None:
    """Writes the checkpoint in ``source`` to ``destination``, which must not exist yet.

    Args:
        source: folder in the layout of the LLaVA code base.
        destination: new folder.
        vision_tower: folder of the CLIP model that the checkpoint names, for one without a tower of its own.

    Raises:
        UnsupportedTargetError: another architecture, projector, way to cut pictures or to put tiles together, or a
            language model that is asked in other words than those of Vicuna and Mistral and does not say in which.
        CheckpointError: a file is damaged or missing, or there is no vision tower.
        FileExistsError: ``destination`` exists.
        DiskFullError: there is no room for it.
    """
    if destination.exists():
        raise FileExistsError(f"'{destination}' exists; name a new folder")
    theirs = _their_settings(source)
    kind = _language_model(theirs)
    files = weight_files(source)
    towers = weight_files(vision_tower) if vision_tower else []
    renamed = {file: _renamed(file, from_clip=file in towers, towerless=bool(towers)) for file in [*files, *towers]}
    _require_parts(source, theirs, [new for names in renamed.values() for new in names.values()])
    config, processor = _describe(source, theirs, kind, vision_tower)
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with room_for(destination):
            partial.mkdir(parents=True)
            _write_weights(partial, renamed, config.text_config.vocab_size)
            config.save_pretrained(partial)
            processor.save_pretrained(partial)
            tokenizer = processor.tokenizer
            ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(partial)
            partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _their_settings(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    if not file.is_file():
        raise CheckpointError(f"'{source}' has no config.json; name a folder in the layout of the LLaVA code base")
    theirs = read_settings(file)
    needed = (*_NEEDED, "image_grid_pinpoints") if _tiled(theirs) else _NEEDED
    if missing := [name for name in needed if not theirs.get(name)]:
        raise damaged(file, f"lacks {', '.join(missing)}")
    return theirs


def _renamed(file: Path, *, from_clip: bool, towerless: bool) -> dict[str, str]:
    """transformers' name of each tensor in ``file`` that is taken, by the name that it has there.

    Args:
        file: weight file.
        from_clip: it is that of a CLIP model.
        towerless: a vision tower in it is not taken: one that was named takes its place.
    """
    names = tensor_readers(file)
    if from_clip:
        return {name: new for name in names if (new := _from_clip(name)) is not None}
    return {
        name: new
        for name in names
        if not (towerless and name.startswith(_TOWER)) and (new := _from_llava(file, name)) is not None
    }


def _require_parts(source: Path, theirs: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuses a checkpoint of which a whole part is missing; that all of its tensors are there loading it says."""
    if not any(name.startswith("vision_tower.") for name in names):
        tower = theirs.get("mm_vision_tower", "the CLIP model")
        raise CheckpointError(f"'{source}' holds no vision tower; name a copy of {tower} with --vision-tower <folder>")
    for part in ("multi_modal_projector.", "language_model.model.layers.", "language_model.lm_head."):
        if not any(name.startswith(part) for name in names):
            raise CheckpointError(
                f"'{source}' holds no tensors of {part.rstrip('.')}; complete the download, or name another copy"
            )


def _write_weights(folder: Path, renamed: Mapping[Path, Mapping[str, str]], vocabulary: int) -> None:
    """A shard per file, and their index; one shard is in memory at a time."""
    index: dict[str, str] = {}
    for number, (file, names) in enumerate(renamed.items(), 1):
        shard = f"model-{number:05}-of-{len(renamed):05}.safetensors"
        readers = tensor_readers(file)
        tensors = {
            new: grown_rows(readers[name](), vocabulary) if name in _VOCABULARY else readers[name]()
            for name, new in names.items()
        }
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _language_model(theirs: Mapping[str, Any]) -> str:
    name, merge = theirs["architectures"][0], theirs.get("mm_patch_merge_type", "flat")
    for field, value, known in (
        ("architectures", name, LANGUAGE_MODELS),
        ("mm_projector_type", theirs.get("mm_projector_type", "linear"), ("mlp2x_gelu",)),
        ("mm_vision_select_feature", theirs.get("mm_vision_select_feature", "patch"), ("patch",)),
        ("image_aspect_ratio", _aspect(theirs), ("anyres", "pad", "square")),
        ("mm_patch_merge_type", merge, ("spatial_unpad",) if _tiled(theirs) else (merge,)),
    ):
        if value not in known:
            raise UnsupportedTargetError(
                f"{field} is {value!r}, which transformers' LLaVA cannot express; take a checkpoint that was trained "
                f"with {' or '.join(known)}"
            )
    return LANGUAGE_MODELS[name]


def _aspect(theirs: Mapping[str, Any]) -> str:
    """How pictures are brought to the tower's square; of checkpoints that do not say, as the code base does it."""
    return theirs.get("image_aspect_ratio") or "square"


def _tiled(theirs: Mapping[str, Any]) -> bool:
    """LLaVA-NeXT cuts pictures into tiles; LLaVA-1.5 does not."""
    return _aspect(theirs) == "anyres"


def _describe(source: Path, theirs: Mapping[str, Any], kind: str, vision_tower: Path | None) -> tuple[Any, Any]:
    """Configuration and processor in transformers' terms.

    Raises:
        CheckpointError: a tokenizer, the package that reads it or the vision tower's configuration is damaged or
            missing.
        UnsupportedTargetError: nothing says how the checkpoint is asked.
    """
    tokenizer = read_processor(source, AutoTokenizer)
    template = chat_template(source, tokenizer, kind)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE], "pad_token": "<pad>"})
    text = {field: theirs[field] for field in _TEXT_FIELDS if field in theirs}
    text |= {"model_type": kind, "vocab_size": padded_vocabulary(len(tokenizer))}
    if kind == "mistral":
        text["sliding_window"] = theirs.get("sliding_window")
    shared: dict[str, Any] = {
        "text_config": text,
        "image_token_index": tokenizer.convert_tokens_to_ids(IMAGE),
        "vision_feature_layer": theirs["mm_vision_select_layer"],
    }
    if vision_tower:
        if not (vision_tower / "config.json").is_file():
            raise CheckpointError(f"'{vision_tower}' has no config.json; --vision-tower is the folder of a CLIP model")
        tower = read_settings(vision_tower / "config.json")
        shared["vision_config"] = tower.get("vision_config", tower) | {"model_type": "clip_vision_model"}
    if _tiled(theirs):
        config: Any = LlavaNextConfig(**shared, image_grid_pinpoints=theirs["image_grid_pinpoints"])
        config.architectures = ["LlavaNextForConditionalGeneration"]
    else:
        config = LlavaConfig(**shared)
        config.architectures = ["LlavaForConditionalGeneration"]
    side = config.vision_config.image_size
    size: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    about = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "chat_template": template,
    }
    if _tiled(theirs):
        images = LlavaNextImageProcessor(**size, image_grid_pinpoints=config.image_grid_pinpoints)
        return config, LlavaNextProcessor(images, tokenizer, **about)
    # LLaVA-1.5 was trained on pictures padded to squares, the first LLaVA on the squares in their middle.
    images = LlavaImageProcessor(**size, do_pad=_aspect(theirs) == "pad")
    return config, LlavaProcessor(images, tokenizer, **about)


def _from_llava(file: Path, name: str) -> str | None:
    """transformers' name of a tensor of the code base; None for tables that are computed anew."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    for old, new in _RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    raise damaged(file, f"holds '{name}', which is no tensor of a LLaVA")


def _from_clip(name: str) -> str | None:
    """transformers' name of a tensor of CLIP; None for what is not its vision tower."""
    return f"vision_tower.{name}" if name.startswith("vision_model.") else None


def padded_vocabulary(entries: int) -> int:
    """``entries``, and some to spare."""
    return -(-entries // _VOCABULARY_STEP) * _VOCABULARY_STEP


def grown_rows(rows: Tensor, count: int) -> Tensor:
    """``rows`` and, up to ``count``, their mean: as rows of an LM head they can never win."""
    mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
    return torch.cat([rows, mean.expand(count - rows.shape[0], -1)])


def main(given: Sequence[str] | None = None) -> None:
    """The command line; a user's error ends it with one sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m fovea.targets.llava_checkpoint", description=__doc__)
    parser.add_argument("source", type=Path, help="folder in the layout of the LLaVA code base")
    parser.add_argument("destination", type=Path, help="new folder; name it with model.path=")
    parser.add_argument("--vision-tower", type=Path, help="folder of the CLIP model, if the checkpoint lacks it")
    arguments = parser.parse_args(given)
    try:
        convert(arguments.source, arguments.destination, arguments.vision_tower)
    except (UnsupportedTargetError, PromptError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
