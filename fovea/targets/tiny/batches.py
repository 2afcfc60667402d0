"""Training batches: scenes as token ids, positions, labels and pixels, in the form the processor gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fovea.targets.tiny.scenes import Turn
from fovea.targets.tiny.tokenizer import END_OF_TEXT, IM_END, IM_START

#: Label of tokens that no loss is taken on.
IGNORED = -100


class Block(NamedTuple):
    """Where the visual tokens of a picture stand: rotary positions from the block's start, and how far they reach."""

    places: list[tuple[int, ...]]
    advance: int


class PictureReader(ABC):
    """How a target reads pictures.

    Attributes:
        before, token, after: what stands in the prompt before a picture, for each visual token, and behind it.
        axes: rotary axes of a position.
    """

    before: str
    token: str
    after: str
    axes: int

    @abstractmethod
    def block(self, image: Image.Image) -> Block:
        """The visual tokens of ``image``."""

    @abstractmethod
    def vision(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The model's vision inputs for ``images``, at least one."""


@dataclass(frozen=True)
class Batch:
    """Conversations padded on the right: ``ids`` and ``labels`` [B, T], ``positions`` [A, B, T], ``vision`` inputs."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    vision: dict[str, Tensor]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``."""
        vision = {name: value.to(device) for name, value in self.vision.items()}
        return Batch(self.ids.to(device), self.labels.to(device), self.positions.to(device), vision)


class Encoder:
    """Writes conversations as the chat template does, with the target's rotary positions, and labels their answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reader: PictureReader) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._known: dict[str, list[int]] = {}
        ids = tokenizer.get_vocab()
        self._padding, self._image, self._end = ids[END_OF_TEXT], ids[reader.token], ids[IM_END]

    def batch(self, items: Sequence[tuple[Sequence[Image.Image], Sequence[Turn]]]) -> Batch:
        """One row per conversation: its pictures, which its first question shows, and its turns."""
        rows = [self._row(images, turns) for images, turns in items]
        longest = max(len(ids) for ids, _, _ in rows)
        ids = np.full((len(rows), longest), self._padding)
        labels = np.full((len(rows), longest), IGNORED)
        positions = np.zeros((self._reader.axes, len(rows), longest), dtype=np.int64)
        for row, (tokens, targets, places) in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = targets
            positions[:, row, : len(tokens)] = np.asarray(places).T
        pictures = [image for images, _ in items for image in images]
        vision = self._reader.vision(pictures) if pictures else {}
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions), vision)

    def _row(self, images: Sequence[Image.Image], turns: Sequence[Turn]) -> tuple[list[int], list[int], list]:
        ids: list[int] = []
        labels: list[int] = []
        places: list[tuple[int, ...]] = []
        position = 0

        def write(tokens: list[int], supervised: bool = False) -> None:
            nonlocal position
            ids.extend(tokens)
            labels.extend(tokens if supervised else [IGNORED] * len(tokens))
            places.extend((p,) * self._reader.axes for p in range(position, position + len(tokens)))
            position += len(tokens)

        for index, turn in enumerate(turns):
            shown = images if index == 0 else ()
            text = f"{IM_START}user\n"
            for image in shown:
                write(self._ids(text + self._reader.before))
                block = self._reader.block(image)
                ids.extend([self._image] * len(block.places))
                labels.extend([IGNORED] * len(block.places))
                places.extend(tuple(position + step for step in place) for place in block.places)
                position += block.advance
                text = self._reader.after
            write(self._ids(f"{text}{turn.question}{IM_END}\n{IM_START}assistant\n"))
            write([*self._ids(turn.answer), self._end], supervised=True)
            write(self._ids("\n"))
        return ids, labels, places

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known[text]
