"""LLaVA-1.5's and LLaVA-NeXT's architecture in miniature: a CLIP tower, a perceptron, a Llama.

The tower takes squares of three by three cells, a patch each. LLaVA-1.5 sees one such square. LLaVA-NeXT sees the
picture squeezed into one, and then its tiles: boards have one, banners have several, whose rows or columns that only
show padding are dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor, nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from fovea.targets.llava import Tiling
from fovea.targets.tiny.architecture import Architecture, built
from fovea.targets.tiny.batches import Block, PictureReader
from fovea.targets.tiny.config import TinyConfig
from fovea.targets.tiny.drawing import CELL
from fovea.targets.tiny.tokenizer import CHAT_TOKENS, chat_template

_IMAGE = "<image>"
#: Cells along the side of what the tower sees at once, and its size in pixels.
_SIDE = 3
_TILE = _SIDE * CELL
#: Heights and widths that a picture is tiled in.
_RESOLUTIONS = [[_TILE * rows, _TILE * columns] for rows, columns in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2))]


class Llava15(Architecture):
    """One square of three by three visual tokens per picture."""

    special_tokens = (*CHAT_TOKENS, _IMAGE)
    template = chat_template(image=f"{_IMAGE}\n")
    pictures = "boards"
    alphabet = ((_SIDE, 40),)
    model_class: ClassVar[Any] = LlavaForConditionalGeneration

    def new_model(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase, layers: int) -> Any:
        """See :meth:`Architecture.new_model`."""
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        return built(
            self.model_class,
            self.config(
                text_config=LlamaConfig(**self.text_fields(config, tokenizer, layers), rope_parameters=rope),
                vision_config=CLIPVisionConfig(
                    hidden_size=config.vision_hidden_size,
                    intermediate_size=config.vision_intermediate_size,
                    num_hidden_layers=config.vision_depth,
                    num_attention_heads=config.vision_heads,
                    image_size=_TILE,
                    patch_size=CELL,
                ),
                image_token_index=tokenizer.get_vocab()[_IMAGE],
                image_seq_length=_SIDE**2,
                tie_word_embeddings=True,
            ),
        )

    @staticmethod
    def config(**fields: Any) -> Any:
        """The configuration of ``fields``."""
        return LlavaConfig(**fields)

    def processor(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
        """See :meth:`Architecture.processor`."""
        return LlavaProcessor(CLIPImageProcessor(**_SIZE), tokenizer, **_about(tokenizer))

    def reader(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PictureReader:
        """See :meth:`Architecture.reader`."""
        return _Reader(self.processor(config, tokenizer).image_processor)

    def eyes(self, model: Any) -> list[nn.Module]:
        """The tower and the projector."""
        return [model.model.vision_tower, model.model.multi_modal_projector]

    def cells(self, model: Any, pictures: Sequence[Image.Image]) -> Tensor:
        """See :meth:`Architecture.cells`; seen as squares, whatever becomes of tiles."""
        squares = CLIPImageProcessor(**_SIZE)(images=list(pictures), return_tensors="pt")["pixel_values"]
        layer = model.config.vision_feature_layer
        seen = model.model.vision_tower(squares.to(model.device), output_hidden_states=True).hidden_states[layer]
        return model.model.multi_modal_projector(seen[:, 1:]).flatten(0, 1)


class LlavaNext(Llava15):
    """A square and tiles per picture."""

    pictures = "banners"
    model_class = LlavaNextForConditionalGeneration

    @staticmethod
    def config(**fields: Any) -> LlavaNextConfig:
        """The configuration of ``fields``."""
        return LlavaNextConfig(**fields, image_grid_pinpoints=_RESOLUTIONS)

    def processor(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> LlavaNextProcessor:
        """See :meth:`Architecture.processor`."""
        images = LlavaNextImageProcessor(**_SIZE, image_grid_pinpoints=_RESOLUTIONS)
        return LlavaNextProcessor(images, tokenizer, **_about(tokenizer))

    def reader(self, config: TinyConfig, tokenizer: PreTrainedTokenizerBase) -> PictureReader:
        """See :meth:`Architecture.reader`."""
        return _TileReader(self.processor(config, tokenizer).image_processor)

    def language(self, model: Any) -> list[nn.Module]:
        """The language model, and the token that ends a line of a picture."""
        return [*super().language(model), nn.ParameterList([model.model.image_newline])]


class _Reader(PictureReader):
    """Visual tokens follow one another on the one rotary axis, as all tokens do."""

    before, token, after = "", _IMAGE, "\n"
    axes = 1

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor

    def block(self, image: Image.Image) -> Block:
        count = self._count(image)
        return Block([(place,) for place in range(count)], count)

    def vision(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        return dict(self._processor(images=list(images), return_tensors="pt"))

    def _count(self, image: Image.Image) -> int:
        return _SIDE**2


class _TileReader(_Reader):
    """Likewise, of square and tiles."""

    _tiling = Tiling(_SIDE, _TILE, _RESOLUTIONS)

    def _count(self, image: Image.Image) -> int:
        (rows, columns), _ = self._tiling.kept(*image.size)
        return _SIDE**2 + rows * (columns + 1)


_SIZE: dict[str, Any] = {"size": {"shortest_edge": _TILE}, "crop_size": {"height": _TILE, "width": _TILE}}


def _about(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a processor of the LLaVA family knows of the model."""
    return {
        "patch_size": CELL,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "chat_template": tokenizer.chat_template,
    }
