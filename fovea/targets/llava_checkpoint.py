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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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

from fovea.targets.checkpoint import CheckpointError, weight_files
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
_TOWER = "model.vision_tower.vision_tower."
_RENAMED = (
    (_TOWER, "vision_tower."),
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.image_newline", "image_newline"),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)

# What the code base trains and asks Vicuna with (its conversation "v1"), and Mistral (its "mistral_instruct").
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# Pictures stand before the text in Vicuna's turns, a system message in Mistral's first instruction. The space that the
# code base puts between Mistral's answers and their end is left out: the target's own answers have none.
_TEMPLATES = {
    "llama": (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | map(attribute='text') | join + ' ' }}"
        '{% else %}{{ "' + _VICUNA + "\" + ' ' }}{% endif %}"
        "{% for message in messages if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
        "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
        "{{ '</s>' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "mistral": (
        "{% for message in messages if message['role'] != 'system' %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'][0]['text'] + '</s>' }}{% else %}{{ '[INST] ' }}"
        "{% if loop.first and messages[0]['role'] == 'system' %}"
        "{{ '<<SYS>>\\n' + messages[0]['content'] | map(attribute='text') | join + '\\n<</SYS>>\\n\\n' }}{% endif %}"
        "{% for part in message['content'] %}{{ '<image>\\n' if part['type'] == 'image' else part['text'] }}"
        "{% endfor %}{{ ' [/INST]' }}{% endif %}{% endfor %}"
    ),
}


def convert(source: Path, destination: Path, vision_tower: Path | None = None) -> None:
    """Writes the checkpoint in ``source`` to ``destination``, which must not exist yet.

    Args:
        source: folder in the layout of the LLaVA code base.
        destination: new folder.
        vision_tower: folder of the CLIP model that the checkpoint names, for one without a tower of its own.

    Raises:
        UnsupportedTargetError: another architecture, projector or way to put tiles together.
        CheckpointError: there are no weights, or no vision tower among them.
        FileExistsError: ``destination`` exists.
    """
    theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kind = _language_model(theirs)
    files = weight_files(source)
    towers = weight_files(vision_tower) if vision_tower else []
    if not towers and not any(name.startswith(_TOWER) for file in files for name in _tensors(file)):
        raise CheckpointError(
            f"'{source}' holds no vision tower; name a copy of {theirs['mm_vision_tower']} with --vision-tower <folder>"
        )
    config, processor = _describe(source, theirs, kind, vision_tower)
    destination.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, file in enumerate([*files, *towers], 1):
        shard = f"model-{number:05}-of-{len(files) + len(towers):05}.safetensors"
        rename = _from_clip if file in towers else _from_llava
        tensors = {}
        for name, read in _tensors(file).items():
            new = rename(name)
            # A tower that was named takes the place of one that is there.
            if new is None or (towers and file not in towers and name.startswith(_TOWER)):
                continue
            tensors[new] = grown_rows(read(), config.text_config.vocab_size) if name in _VOCABULARY else read()
        save_file(tensors, destination / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
    (destination / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(destination)
    processor.save_pretrained(destination)
    tokenizer = processor.tokenizer
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(destination)


def _language_model(theirs: dict[str, Any]) -> str:
    name = theirs["architectures"][0]
    projector = theirs.get("mm_projector_type", "linear")
    feature = theirs.get("mm_vision_select_feature", "patch")
    merge = theirs.get("mm_patch_merge_type", "flat")
    for field, value, fits in (
        ("architectures", name, name in LANGUAGE_MODELS),
        ("mm_projector_type", projector, projector == "mlp2x_gelu"),
        ("mm_vision_select_feature", feature, feature == "patch"),
        ("mm_patch_merge_type", merge, merge == "spatial_unpad" or not _tiled(theirs)),
    ):
        if not fits:
            raise UnsupportedTargetError(f"{field} is {value!r}, which transformers' LLaVA cannot express")
    return LANGUAGE_MODELS[name]


def _tiled(theirs: dict[str, Any]) -> bool:
    """LLaVA-NeXT cuts pictures into tiles; LLaVA-1.5 does not."""
    return theirs.get("image_aspect_ratio") == "anyres"


def _describe(source: Path, theirs: dict[str, Any], kind: str, vision_tower: Path | None) -> tuple[Any, Any]:
    """Configuration and processor in transformers' terms."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
    text = {field: theirs[field] for field in _TEXT_FIELDS if field in theirs}
    text |= {"model_type": kind, "vocab_size": padded_vocabulary(len(tokenizer))}
    if kind == "mistral":
        text["sliding_window"] = theirs.get("sliding_window")
    shared: dict[str, Any] = {
        "text_config": text,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_layer": theirs["mm_vision_select_layer"],
    }
    if vision_tower:
        tower = json.loads((vision_tower / "config.json").read_text(encoding="utf-8"))
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
        "chat_template": _TEMPLATES[kind],
    }
    if _tiled(theirs):
        images = LlavaNextImageProcessor(**size, image_grid_pinpoints=config.image_grid_pinpoints)
        return config, LlavaNextProcessor(images, tokenizer, **about)
    # LLaVA-1.5 was trained on pictures padded to squares.
    images = LlavaImageProcessor(**size, do_pad=True)
    return config, LlavaProcessor(images, tokenizer, **about)


def _from_llava(name: str) -> str | None:
    """transformers' name of a tensor of the code base; None for tables that are computed anew."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    old, new = next((old, new) for old, new in _RENAMED if name.startswith(old))
    return new + name.removeprefix(old)


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


def _tensors(file: Path) -> dict[str, Callable[[], Tensor]]:
    """The names of the tensors in ``file``, and what reads each of them."""
    if file.suffix == ".safetensors":
        stream = safe_open(file, framework="pt")
        return {name: partial(stream.get_tensor, name) for name in stream.keys()}  # noqa: SIM118 - no dictionary
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: tensor.clone for name, tensor in state.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fovea.targets.llava_checkpoint", description=__doc__)
    parser.add_argument("source", type=Path, help="folder in the layout of the LLaVA code base")
    parser.add_argument("destination", type=Path, help="new folder; name it with model.path=")
    parser.add_argument("--vision-tower", type=Path, help="folder of the CLIP model, if the checkpoint lacks it")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.destination, arguments.vision_tower)


if __name__ == "__main__":
    main()
