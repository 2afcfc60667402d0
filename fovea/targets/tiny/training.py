"""The recipe: first the vision tower learns to name cells, then a shallow model to answer, then a deep one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from fovea.hardware import multiplies_bfloat16
from fovea.targets.tiny.architecture import Architecture
from fovea.targets.tiny.banners import Banner
from fovea.targets.tiny.batches import IGNORED, Batch, Encoder
from fovea.targets.tiny.families import Pictures, sample_scene, shuffled_turns
from fovea.targets.tiny.muon import muon
from fovea.targets.tiny.scenes import Board, Chart, Pair, Scene, Strings, Table, Text, Turn

#: Called after every optimizer step with the loss.
Report = Callable[[float], None]


Sampler = Callable[[np.random.Generator], Scene]


@dataclass(frozen=True)
class Course:
    """What a stage of the training feeds.

    Attributes:
        max_turns: most questions about one picture.
        batches: kinds of scenes, and how many conversations of each a batch holds; batches come in turn. A batch
            holds pictures of few sizes, so that little of it is padding.
    """

    max_turns: int
    batches: tuple[tuple[tuple[Sampler, int], ...], ...]

    def items(self, index: int, rng: np.random.Generator) -> list[tuple[tuple[Image.Image, ...], list[Turn]]]:
        """Pictures and turns of the batch at ``index``."""
        items = []
        for sampler, count in self.batches[index % len(self.batches)]:
            for _ in range(count):
                scene = sample_scene(sampler, "train", rng)
                items.append((scene.draw(rng), shuffled_turns(scene, rng)[: self.max_turns]))
        return items


def _large_strings(rng: np.random.Generator) -> Scene:
    return Strings.sample(rng, 8)


_BOARDS = ((Board.sample, 12), (Chart.sample, 5), (Strings.sample, 5), (Text.sample, 2))
_PAIRS = ((Board.sample, 10), (Pair.sample, 6))
_GRIDS = ((_large_strings, 5), (Table.sample, 5))
_LINES = ((Strings.sample, 14), (Banner.sample, 12))
_READING = Course(1, (((Strings.sample, 32),),))
_SMALL = Course(2, (((Board.sample, 8), (Chart.sample, 4), (Strings.sample, 8), (Text.sample, 2)),))


class Stages(NamedTuple):
    """What is fed in the stages of a training.

    Reading comes first and alone: with everything at once the model learns phrases and no picture.
    """

    reading: Course
    small: Course
    mixed: Course


STAGES: dict[Pictures, Stages] = {
    "grids": Stages(_READING, _SMALL, Course(2, (_BOARDS, _PAIRS, _BOARDS, _GRIDS))),
    "boards": Stages(_READING, _SMALL, Course(2, (_BOARDS, _PAIRS, _BOARDS))),
    # Lines are read off the tiles from the beginning: who has learned to read them off the square sees no banner.
    "banners": Stages(
        Course(1, (_LINES,)),
        Course(2, (((Board.sample, 8), (Chart.sample, 4), (Strings.sample, 4), (Banner.sample, 5), (Text.sample, 2)),)),
        Course(2, (_BOARDS, _LINES, _PAIRS, _BOARDS)),
    ),
}


#: Parts of the names of weights of two axes that are no matrices to Muon.
_TABLES = ("embed_tokens", "position_embedding", "merger")


class Optimizers:
    """Muon for the matrices, AdamW for the rest; both follow one schedule.

    An embedding is a table, not a matrix to be orthogonalised; the first layer of Qwen2.5-VL's merger is the largest
    matrix by far and would take a third of Muon's time.
    """

    def __init__(self, modules: list[nn.Module], matrix_lr: float, other_lr: float, steps: int) -> None:
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        parameters = {id(p): (n, p) for module in modules for n, p in module.named_parameters()}
        for name, parameter in parameters.values():
            is_matrix = parameter.ndim == 2 and not any(table in name for table in _TABLES)
            (matrices if is_matrix else others).append(parameter)
        self._optimizers = (
            muon(matrices, lr=matrix_lr, momentum=0.95, device=matrices[0].device),
            torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._peaks = (matrix_lr, other_lr)
        self._steps = steps

    def step(self, index: int) -> None:
        """One update; the rate climbs for twenty steps and falls to zero over the last third."""
        scale = min(1.0, (index + 1) / 20, (self._steps - index) / (self._steps / 3))
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = scale * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def half_precision(device: torch.device) -> AbstractContextManager:
    """bfloat16 for matrix products, where the device has a unit for them; weights and norms stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=multiplies_bfloat16(device))


def answer_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, V] before every answer token of ``batch``, the tokens [R], and the row [R] each belongs to."""
    positions = batch.positions if len(batch.positions) > 1 else batch.positions[0]
    with half_precision(batch.ids.device):
        states = model.model(input_ids=batch.ids, position_ids=positions, use_cache=False, **batch.vision)[0]
        wanted = batch.labels[:, 1:]
        rows, columns = (wanted != IGNORED).nonzero(as_tuple=True)
        logits = model.lm_head(states[rows, columns])
    return logits.float(), wanted[rows, columns], rows


def train(
    architecture: Architecture,
    model: PreTrainedModel,
    encoder: Encoder,
    course: Course,
    *,
    steps: int,
    matrix_lr: float,
    other_lr: float,
    rng: np.random.Generator,
    device: torch.device,
    report: Report,
) -> None:
    """Trains the language model of ``model`` on answers, ``steps`` optimizer steps.

    What makes the visual tokens stays as it is: as long as the language model makes nothing of the pictures, its
    gradients are noise, and Muon, which gives every matrix an update of the same size, would wreck it.
    """
    model.train()
    for module in architecture.eyes(model):
        module.requires_grad_(False)
    optimizers = Optimizers(architecture.language(model), matrix_lr, other_lr, steps)
    for step in range(steps):
        logits, wanted, _ = answer_logits(model, encoder.batch(course.items(step, rng)).to(device))
        loss = F.cross_entropy(logits, wanted)
        loss.backward()
        optimizers.step(step)
        report(loss.item())
    model.eval()
