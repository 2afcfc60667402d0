"""LLaVA-1.5 and LLaVA-NeXT: how they read pictures. Their text has one rotary axis, and images take part in it.

LLaVA-1.5 looks once: the vision tower's patches of the picture, square, side by side.

LLaVA-NeXT looks at the whole picture in that way, squeezed into a square, and then at its tiles: the picture is scaled
into the best of a few resolutions and cut; the tiles' patches are put together again, the rows or columns that only
show padding are dropped, and a learned embedding (``image_newline``) closes every row. Its visual tokens are all of
these, in this order: side * side + rows * (columns + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    PreTrainedModel,
)
from transformers.image_processing_utils import select_best_resolution

from fovea.targets.base import Box, TargetSpec, View
from fovea.targets.encoding import Grid, ReadImages
from fovea.targets.hf import HFTarget
from fovea.targets.spec import UnsupportedTargetError, decoder_spec

#: Vision towers that cut a picture into square patches, and the tokens that they put in front of these.
_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}

#: Largest ratio of the sides of a picture for LLaVA-1.5; Qwen2.5-VL's own is the same.
_LONGEST = 200


class Llava(HFTarget):
    """LLaVA-1.5 behind the Target contract."""

    model_class: Any = LlavaForConditionalGeneration
    processor_class = AutoProcessor

    def __init__(self, model: PreTrainedModel, processor: Any, spec: TargetSpec) -> None:
        config: Any = model.config
        tower = config.vision_config
        self.image_token = processor.image_token
        self.image_token_id = config.image_token_id
        self._image_size: int = tower.image_size
        self._side: int = tower.image_size // tower.patch_size
        self._extra = _TOWERS[tower.model_type] if config.vision_feature_select_strategy == "full" else 0
        self._inner: Any = model.model
        # The model decides; older processor files lack these fields.
        processor.patch_size = tower.patch_size
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        processor.num_additional_image_tokens = _TOWERS[tower.model_type]
        super().__init__(model, processor, spec)

    @staticmethod
    def read_spec(config: Any, eos_ids: tuple[int, ...]) -> TargetSpec:
        """The spec of a checkpoint.

        Raises:
            UnsupportedTargetError: as for every decoder, and for a vision tower whose tokens are not its patches.
        """
        kind, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
        if kind not in _TOWERS:
            raise UnsupportedTargetError(f"{config.architectures[0]} sees with a {kind}; use one of {sorted(_TOWERS)}")
        if strategy == "default" and not _TOWERS[kind]:
            raise UnsupportedTargetError(
                f"vision_feature_select_strategy=default drops the first token of each image, which for a {kind} is a "
                "patch; set it to full in config.json"
            )
        return decoder_spec(config, config.text_config, eos_ids, placeholder_ids=(config.image_token_id,))

    def read_images(self, images: Sequence[Image.Image]) -> ReadImages:
        """``pixel_values``; a grid of patches per image, behind a class token if the model keeps it.

        Raises:
            ValueError: pictures of another size than the vision tower takes, or so long that scaling their short side
                to that size would fill the memory.
        """
        for width, height in (image.size for image in images):
            if max(width, height) > _LONGEST * min(width, height):
                raise ValueError(
                    f"a picture of {width}x{height} pixels is over {_LONGEST} times as long as broad; cut it"
                )
        read = self._read(images)
        grids: list[Grid] = []
        views: list[View] = []
        for number, image in enumerate(images):
            box = _shown_by_a_square(self.processor.image_processor, *image.size)
            grids += [(1, 1)] * self._extra + [(self._side, self._side)]
            views += [View(number, box)] * (self._extra + 1)
        return ReadImages({"pixel_values": read["pixel_values"]}, tuple(grids), tuple(views))

    def visual_tokens(self, vision: Mapping[str, Tensor]) -> Tensor:
        """[N, D] projected features of all images, in reading order."""
        return torch.cat(list(self._inner.get_image_features(**vision).pooler_output)).to(self.dtype)

    def _read(self, images: Sequence[Image.Image]) -> Any:
        """What the image processor makes of ``images``.

        Raises:
            ValueError: pictures of another size than the vision tower takes.
        """
        read = self.processor.image_processor(images=list(images), return_tensors="pt")
        size = tuple(read["pixel_values"].shape[-2:])
        if size != (self._image_size, self._image_size):
            raise ValueError(
                f"it makes pictures of {size[0]}x{size[1]} pixels and the vision tower takes {self._image_size}; "
                "correct size and crop_size in preprocessor_config.json"
            )
        return read


@dataclass(frozen=True)
class Tiling:
    """How LLaVA-NeXT cuts a picture into tiles, and which of the tiles' patches it keeps.

    Attributes:
        side: patches along the side of a tile.
        tile_size: pixels along it.
        resolutions: heights and widths of which the best is taken, in pixels.
    """

    side: int
    tile_size: int
    resolutions: list[list[int]]

    def tiles(self, width: int, height: int) -> Grid:
        """Rows and columns of tiles."""
        best_height, best_width = select_best_resolution((height, width), self.resolutions)
        return best_height // self.tile_size, best_width // self.tile_size

    def kept(self, width: int, height: int) -> tuple[Grid, Box]:
        """Rows and columns of the patches that do not only show padding, and the part of the picture under them.

        The same numbers as transformers' ``unpad_image``, rounding included: a sliver may lose all its rows.
        """
        rows, columns = (self.side * tiles for tiles in self.tiles(width, height))
        if width / height > columns / rows:
            shown = height * (columns / width)
            rows -= (rows - int(round(shown, 7))) // 2 * 2
            return (rows, columns), (0.0, 0.5 - rows / shown / 2, 1.0, 0.5 + rows / shown / 2)
        shown = width * (rows / height)
        columns -= (columns - int(round(shown, 7))) // 2 * 2
        return (rows, columns), (0.5 - columns / shown / 2, 0.0, 0.5 + columns / shown / 2, 1.0)


class LlavaNext(Llava):
    """LLaVA-NeXT (LLaVA-1.6) behind the Target contract."""

    model_class = LlavaNextForConditionalGeneration

    def __init__(self, model: PreTrainedModel, processor: Any, spec: TargetSpec) -> None:
        super().__init__(model, processor, spec)
        config: Any = model.config
        ours, theirs = config.image_grid_pinpoints, processor.image_processor.image_grid_pinpoints
        if sorted(map(tuple, ours)) != sorted(map(tuple, theirs)):
            raise ValueError(
                f"image_grid_pinpoints are {theirs} in the processor and {ours} in config.json; "
                "make them the same, as the model was trained"
            )
        self._tiling = Tiling(self._side, self._image_size, ours)

    @staticmethod
    def read_spec(config: Any, eos_ids: tuple[int, ...]) -> TargetSpec:
        """As for LLaVA-1.5.

        Raises:
            UnsupportedTargetError: also for kept class tokens, which do not fit between the tiles' patches.
        """
        if config.vision_feature_select_strategy == "full" and _TOWERS.get(config.vision_config.model_type):
            raise UnsupportedTargetError(
                f"{config.architectures[0]} cannot put tiles together around class tokens; "
                "set vision_feature_select_strategy=default in config.json"
            )
        return Llava.read_spec(config, eos_ids)

    def read_images(self, images: Sequence[Image.Image]) -> ReadImages:
        """``pixel_values`` of all tiles, one after the other, and ``image_sizes``; two grids per image.

        The first grid shows the picture squeezed into a square, the second its tiles, with a column of line ends.
        """
        read = self._read(images)
        tiles: list[Tensor] = []
        grids: list[Grid] = []
        views: list[View] = []
        for number, image in enumerate(images):
            # Behind the picture and its own tiles stands padding up to the largest image of the conversation.
            tiles.append(read["pixel_values"][number, : 1 + math.prod(self._tiling.tiles(*image.size))])
            (rows, columns), box = self._tiling.kept(*image.size)
            grids += [(self._side, self._side), (rows, columns + 1)]
            views += [View(number), View(number, box, line_ends=1)]
        vision = {"pixel_values": torch.cat(tiles), "image_sizes": read["image_sizes"]}
        return ReadImages(vision, tuple(grids), tuple(views))


def _shown_by_a_square(image_processor: Any, width: int, height: int) -> Box:
    """The box of a picture that reaches the vision tower, which takes squares.

    Image processors squeeze the picture, pad it to its longer side, or cut the middle out along its shorter side.
    """
    if getattr(image_processor, "do_pad", False):
        side = max(width, height)
    elif image_processor.do_center_crop and image_processor.size.get("shortest_edge"):
        side = min(width, height)
    else:
        return (0.0, 0.0, 1.0, 1.0)
    half_x, half_y = side / width / 2, side / height / 2
    return (0.5 - half_x, 0.5 - half_y, 0.5 + half_x, 0.5 + half_y)
