"""What a small target is made of: one implementation per architecture, all trained by the same recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fovea.targets.tiny.batches import PictureReader
from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.families import Pictures
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END


class Architecture(ABC):
    """A kind of small target.

    Attributes:
        special_tokens: of the tokenizer, in this order.
        template: its chat template.
        pictures: what the target is trained on and judged by.
        alphabet: cells a side, and pictures in a batch, in turn, while the vision tower learns its alphabet.
    """

    special_tokens: ClassVar[tuple[str, ...]]
    template: ClassVar[str]
    pictures: ClassVar[Pictures]
    alphabet: ClassVar[tuple[tuple[int, int], ...]]

    @abstractmethod
    def new_model(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int) -> PreTrainedModel:
        """A freshly initialised model of ``layers`` text layers, fp32; eager attention, which trains faster than CPU
        sdpa at these sizes."""

    @abstractmethod
    def processor(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The processor of the checkpoint."""

    @abstractmethod
    def reader(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PictureReader:
        """How pictures enter the training batches."""

    @abstractmethod
    def eyes(self, model: Any) -> list[nn.Module]:
        """The modules that make visual tokens of pixels."""

    @abstractmethod
    def cells(self, model: Any, pictures: Sequence[Image.Image]) -> Tensor:
        """[cells, D] visual tokens of square ``pictures``, one per cell, in reading order."""

    def language(self, model: Any) -> list[nn.Module]:
        """The modules that are trained once the eyes are."""
        return [model.model.language_model]

    @staticmethod
    def text_fields(config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int) -> dict[str, Any]:
        """Configuration of the decoder stack, but for its rotary embedding."""
        ids = tokenizer.get_vocab()
        return {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": ids[IM_END],
            "pad_token_id": ids[END_OF_TEXT],
            "tie_word_embeddings": True,
        }

    def grow(self, model: Any, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A model of ``config.layers`` that computes what the shallow ``model`` computes.

        Behind every layer follow copies of it whose output projections are zero, so that they add nothing until they
        are trained on.
        """
        shallow = model.model.language_model.layers
        deep: Any = self.new_model(config, tokenizer, config.layers)
        weights = {k: v for k, v in model.state_dict().items() if ".language_model.layers." not in k}
        deep.load_state_dict(weights, strict=False)
        copies = config.layers // len(shallow)
        for index, layer in enumerate(deep.model.language_model.layers):
            layer.load_state_dict(shallow[index // copies].state_dict())
            if index % copies:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)
        return deep


def built(model_class: Any, config: Any) -> Any:
    """A freshly initialised model of ``config``."""
    return model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
