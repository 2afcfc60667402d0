"""Loading a target: the whole of it, or only its numbers or the weights that a drafter shares."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from fovea.targets.attention import PROBED_SDPA
from fovea.targets.base import TargetSpec
from fovea.targets.chat_template import find_chat_template
from fovea.targets.checkpoint import (
    CheckpointError,
    damaged,
    load_head,
    read_settings,
    require_whole,
    resolve_checkpoint,
    weight_files,
    weights_fingerprint,
)
from fovea.targets.forward_check import check_forward
from fovea.targets.hf import HFTarget
from fovea.targets.llava import Llava, LlavaNext
from fovea.targets.llava_checkpoint import LANGUAGE_MODELS
from fovea.targets.mid_states import default_mid_layers
from fovea.targets.processor import read_processor
from fovea.targets.quantised import require_quantizer
from fovea.targets.qwen25vl import Qwen25VL
from fovea.targets.remote_code import remote_code_refused
from fovea.targets.spec import UnsupportedTargetError

__all__ = [
    "ADAPTERS",
    "default_mid_layers",
    "load_generation_config",
    "load_head",
    "load_spec",
    "load_target",
    "resolve_checkpoint",
    "weights_fingerprint",
]

logger = logging.getLogger(__name__)

#: Adapter of each architecture that a checkpoint's config.json may name. Other causal language models are tried with
#: HFTarget; whatever the tests do not know is checked against its own forward pass when it is loaded.
ADAPTERS: dict[str, type[HFTarget]] = {
    "LlamaForCausalLM": HFTarget,
    "LlavaForConditionalGeneration": Llava,
    "LlavaNextForConditionalGeneration": LlavaNext,
    "MistralForCausalLM": HFTarget,
    "Qwen2ForCausalLM": HFTarget,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
}
#: What the tests compare with transformers: adapters of architectures, and the language models (by ``model_type``) in
#: them. A LLaVA may hold any other, and an adapter may be somebody's own.
_TESTED_ADAPTERS = frozenset(ADAPTERS.items())
_TESTED_LANGUAGE_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen2_5_vl_text"})


def load_spec(path: str | Path) -> TargetSpec:
    """The numbers of the checkpoint in folder ``path``, from its configuration files alone.

    Raises:
        FileNotFoundError: no config.json in the folder.
        UnsupportedTargetError: an architecture without an adapter, or a part of it that cannot be decoded losslessly.
        ValueError: no end token is named.
    """
    config, adapter = read_config(Path(path))
    return adapter.read_spec(config, _eos_ids(Path(path), config))


def load_target(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> HFTarget:
    """The target in checkpoint folder ``path``, frozen and in evaluation mode.

    The model itself applies nothing of its generation_config.json (repetition penalty, sampling, banned words): how
    tokens are selected is said to every loop alike (:mod:`fovea.decoding.selection`).

    Raises:
        CheckpointError: no config.json, no weights, a damaged file, or some of the model's tensors are missing.
        UnsupportedTargetError: as in :func:`load_spec`, a language model that computes more than its layers say, code
            of the folder's own, or a package that reads quantised weights and is not installed.
        PromptError: the checkpoint has no chat template.
        ValueError: another ``attn_implementation`` than sdpa, the only one that takes a tree mask on every device.
    """
    if attn_implementation != "sdpa":
        raise ValueError(f"attn_implementation='{attn_implementation}' takes no tree mask; use 'sdpa'")
    folder = Path(path)
    config, adapter = read_config(folder)
    eos_ids = _eos_ids(folder, config)
    spec = adapter.read_spec(config, eos_ids)
    processor = read_processor(folder, adapter.processor_class)
    find_chat_template(processor)
    require_quantizer(folder)
    require_whole(weight_files(folder))
    try:
        with remote_code_refused(folder):
            model, loading = adapter.model_class.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, trust_remote_code=False
            )
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise damaged(folder / "config.json", "has other sizes than the weights beside it") from error
    # transformers would go on with random numbers in their place.
    if absent := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"'{folder}' lacks {len(absent)} tensors of a {spec.architecture}, {absent[0]} among them; "
            "point to a complete copy with model.path=<folder>"
        )
    if surplus := sorted(loading["unexpected_keys"]):
        logger.warning(
            "%d tensors of '%s' have no place in a %s, %s among them: config.json may name another architecture than "
            "the weights are of",
            len(surplus),
            folder,
            spec.architecture,
            surplus[0],
        )
    text = config.get_text_config()
    model.set_attn_implementation(PROBED_SDPA if text is config else {"text_config": PROBED_SDPA})
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids), pad_token_id=eos_ids[0])
    target = adapter(model.to(device), processor, spec)
    if (spec.architecture, adapter) not in _TESTED_ADAPTERS or text.model_type not in _TESTED_LANGUAGE_MODELS:
        check_forward(target)
    return target


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """The generation settings of the checkpoint in folder ``path``; None if it brings none."""
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return None
    read_settings(file)
    return GenerationConfig.from_pretrained(path)


def read_config(folder: Path) -> tuple[Any, type[HFTarget]]:
    """The configuration in ``folder`` and the adapter of its architecture.

    The architecture is looked at first: transformers knows nothing of some, and takes others for what they are not.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"'{folder}' has no config.json; point model.path to a checkpoint folder")
    named = read_settings(folder / "config.json").get("architectures")
    name = named[0] if isinstance(named, list) and named else "an unnamed architecture"
    if name in LANGUAGE_MODELS:
        raise UnsupportedTargetError(
            f"'{folder}' is in the layout of the LLaVA code base ({name}); convert it once with "
            f"python -m fovea.targets.llava_checkpoint {folder} <new folder>, and name that with model.path="
        )
    adapter = ADAPTERS.get(name, HFTarget if name.endswith("ForCausalLM") else None)
    if adapter is not None:
        try:
            with remote_code_refused(folder):
                config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except UnsupportedTargetError:
            raise
        except ValueError as error:  # a kind of model that transformers does not know, or a field that cannot be
            raise UnsupportedTargetError(f"'{folder}' holds a {name} that transformers cannot read: {error}") from error
        # A language model has no part that is one.
        if adapter is not HFTarget or config.get_text_config() is config:
            return config, adapter
    raise UnsupportedTargetError(
        f"'{folder}' holds {name}; supported are {', '.join(sorted(ADAPTERS))} and other causal language models; "
        "docs/new_target.md adds one"
    )


def _eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens: of generation_config.json, else of the configuration."""
    settings = load_generation_config(folder)
    named: Any = settings.eos_token_id if settings else None
    if named is None:
        named = config.get_text_config().eos_token_id
    if named is None or named == []:
        raise ValueError(f"'{folder}' names no end token; set eos_token_id in its generation_config.json")
    return tuple(named) if isinstance(named, list) else (named,)
