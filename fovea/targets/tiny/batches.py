"""Training batches: scenes as token ids, positions, labels and patches, in the form the processor gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from fovea.targets.tiny.drawing import CELL
from fovea.targets.tiny.scenes import Turn
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START

#: Label of tokens that no loss is taken on.
IGNORED = -100
_MEAN = np.asarray(OPENAI_CLIP_MEAN, dtype=np.float32)
_STD = np.asarray(OPENAI_CLIP_STD, dtype=np.float32)
_PATCH = CELL // 2


@dataclass(frozen=True)
class Patches:
    """Pictures as the vision tower takes them: ``pixels`` [patches, 1176], ``grids`` [pictures, 3]."""

    pixels: Tensor
    grids: Tensor

    @staticmethod
    def of(images: Iterable[Image.Image]) -> Patches:
        """What Qwen2.5-VL's image processor makes of pictures that need no resizing."""
        pixels, grids = [], []
        for image in images:
            scaled = (np.asarray(image, dtype=np.float32) / 255 - _MEAN) / _STD
            rows, columns = image.height // CELL, image.width // CELL
            cells = scaled.reshape(rows, 2, _PATCH, columns, 2, _PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
            flat = cells.reshape(rows * columns * 4, 3, 1, _PATCH * _PATCH)
            pixels.append(np.broadcast_to(flat, (len(flat), 3, 2, _PATCH * _PATCH)).reshape(len(flat), -1))
            grids.append((1, 2 * rows, 2 * columns))
        return Patches(torch.from_numpy(np.concatenate(pixels)), torch.tensor(grids))

    def to(self, device: torch.device) -> Patches:
        """The patches on ``device``."""
        return Patches(self.pixels.to(device), self.grids.to(device))


@dataclass(frozen=True)
class Batch:
    """Conversations padded on the right: ``ids`` and ``labels`` [B, T], ``positions`` [3, B, T]."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    patches: Patches | None

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``."""
        patches = None if self.patches is None else self.patches.to(device)
        return Batch(self.ids.to(device), self.labels.to(device), self.positions.to(device), patches)


class Encoder:
    """Writes conversations as the chat template does, with M-RoPE positions, and labels their answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        ids = tokenizer.get_vocab()
        self._padding, self._image, self._end = ids[END_OF_TEXT], ids[IMAGE_PAD], ids[IM_END]

    def batch(self, items: Sequence[tuple[Sequence[Image.Image], Sequence[Turn]]]) -> Batch:
        """One row per conversation: its pictures, which its first question shows, and its turns."""
        rows = [self._row(images, turns) for images, turns in items]
        longest = max(len(ids) for ids, _, _ in rows)
        ids = np.full((len(rows), longest), self._padding)
        labels = np.full((len(rows), longest), IGNORED)
        positions = np.zeros((3, len(rows), longest), dtype=np.int64)
        for row, (tokens, targets, places) in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = targets
            positions[:, row, : len(tokens)] = np.asarray(places).T
        pictures = [image for images, _ in items for image in images]
        patches = Patches.of(pictures) if pictures else None
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions), patches)

    def _row(self, images: Sequence[Image.Image], turns: Sequence[Turn]) -> tuple[list[int], list[int], list]:
        ids: list[int] = []
        labels: list[int] = []
        places: list[tuple[int, int, int]] = []
        position = 0

        def write(tokens: list[int], supervised: bool = False) -> None:
            nonlocal position
            ids.extend(tokens)
            labels.extend(tokens if supervised else [IGNORED] * len(tokens))
            places.extend((p, p, p) for p in range(position, position + len(tokens)))
            position += len(tokens)

        for index, turn in enumerate(turns):
            write(self._ids(f"{IM_START}user\n"))
            for image in images if index == 0 else ():
                rows, columns = image.height // CELL, image.width // CELL
                write(self._ids(VISION_START))
                ids.extend([self._image] * (rows * columns))
                labels.extend([IGNORED] * (rows * columns))
                places.extend((position, position + y, position + x) for y in range(rows) for x in range(columns))
                position += max(rows, columns)
                write(self._ids(VISION_END))
            write(self._ids(f"{turn.question}{IM_END}\n{IM_START}assistant\n"))
            write([*self._ids(turn.answer), self._end], supervised=True)
            write(self._ids("\n"))
        return ids, labels, places

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known[text]
