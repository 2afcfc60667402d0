"""The first stage: the vision tower learns to name what is in a cell and where the cell lies.

A picture says nothing to a language model before its tower speaks the model's words, and learning both at once takes
longer than a coffee. Here the visual token of a cell, scored against the word embeddings, must name the content: a
character, the tens of a number, a colour; linear probes, thrown away afterwards, must find the shape, the ones or the
height of a bar, the same of the cell to the left, the row and the column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fovea.targets.tiny.architecture import Architecture
from fovea.targets.tiny.drawing import COLOURS, DIGITS, LETTERS, SHAPES, Canvas
from fovea.targets.tiny.scenes import COLUMN_NAMES, ROW_NAMES
from fovea.targets.tiny.tokenizer import END_OF_TEXT
from fovea.targets.tiny.training import Optimizers, Report, half_precision

#: Content, second content, both of the cell to the left, row, column.
_NAMES = 6


def learn_alphabet(
    architecture: Architecture,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    steps: int,
    matrix_lr: float,
    other_lr: float,
    rng: np.random.Generator,
    device: torch.device,
    report: Report,
) -> None:
    """Trains the vision tower and the word embeddings, ``steps`` optimizer steps."""
    embedding: Any = model.get_input_embeddings()
    width = embedding.embedding_dim
    probes = nn.Linear(width, (_NAMES - 1) * width, bias=False).to(device)
    optimizers = Optimizers([*architecture.eyes(model), embedding, probes], matrix_lr, other_lr, steps)
    words = _Words(tokenizer)
    for step in range(steps):
        side, pictures = architecture.alphabet[step % len(architecture.alphabet)]
        drawn = [_random_cells(side, words, rng) for _ in range(pictures)]
        wanted = torch.tensor([names for _, cells in drawn for names in cells], device=device)
        with half_precision(device):
            tokens = F.rms_norm(architecture.cells(model, [image for image, _ in drawn]).float(), (width,))
            views = torch.cat([tokens, probes(tokens)], dim=-1).view(-1, width)
            logits = F.linear(views, embedding.weight)
        loss = F.cross_entropy(logits.float(), wanted.view(-1)) * _NAMES
        loss.backward()
        optimizers.step(step)
        report(loss.item())


class _Words:
    """The token that stands for a word, the last one if there are several, and for nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        spoken = (*COLOURS, *SHAPES, *ROW_NAMES, *COLUMN_NAMES)
        words = [*LETTERS, *DIGITS, *(f" {word}" for word in spoken), END_OF_TEXT]
        self._ids = {word.strip(): tokenizer(word)["input_ids"][-1] for word in words}

    def __call__(self, *words: str) -> list[int]:
        return [self._ids[word] for word in words]


def _random_cells(side: int, words: _Words, rng: np.random.Generator) -> tuple[Image.Image, list[list[int]]]:
    """A picture of ``side`` x ``side`` cells with something or nothing in each, and the names of every cell."""
    canvas = Canvas(side, side, rng)
    names: list[list[int]] = []
    content_of: dict[tuple[int, ...], tuple[str, ...]] = {}
    shares = rng.dirichlet((1, 1, 1, 1)) * 0.85
    if rng.random() < 0.3:
        canvas.frame((int(rng.integers(side)), 0), side)
    for place in np.ndindex(side, side):
        kind = rng.choice(5, p=[*shares, 0.15])
        content = (END_OF_TEXT, END_OF_TEXT)
        if kind == 0:
            content = (str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)))
            canvas.shape(place, shape=content[1], colour=content[0])
        elif kind == 1:
            content = (str(rng.choice(list(LETTERS + DIGITS))), END_OF_TEXT)
            canvas.glyph(place, content[0])
        elif kind == 2:
            content = (str(rng.integers(10)), str(rng.integers(10)))
            canvas.glyph(place, "".join(content))
        elif kind == 3:
            content = (str(rng.choice(list(COLOURS))), str(rng.integers(1, 3)))
            canvas.bar(place, int(content[1]), content[0])
        left = content_of.get((place[0], place[1] - 1), (END_OF_TEXT, END_OF_TEXT))
        content_of[place] = content
        names.append(words(*content, *left, *_place_words(place, side)))
    return canvas.image(), names


def _place_words(place: tuple[int, ...], side: int) -> tuple[str, str]:
    """Row and column as questions call them: by name in a grid of three by three, else by number."""
    row, column = place
    return (ROW_NAMES[row], COLUMN_NAMES[column]) if side == len(ROW_NAMES) else (str(row + 1), str(column + 1))
