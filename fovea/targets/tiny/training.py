"""The recipe: first the vision tower learns to name cells, then a shallow model to answer, then a deep one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from fovea.targets.tiny.batches import IGNORED, Batch, Encoder
from fovea.targets.tiny.families import sample_scene, shuffled_turns
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
#: Reading comes first and alone: with everything at once the model learns phrases and no picture.
READING = Course(1, (((Strings.sample, 32),),))
SMALL = Course(2, (((Board.sample, 8), (Chart.sample, 4), (Strings.sample, 8), (Text.sample, 2)),))
MIXED = Course(2, (_BOARDS, ((Board.sample, 10), (Pair.sample, 6)), _BOARDS, ((_large_strings, 5), (Table.sample, 5))))


class Optimizers:
    """Muon for the matrices, AdamW for the rest; both follow one schedule.

    The embedding is a table, not a matrix to be orthogonalised; the merger's first layer is the largest matrix by far
    and would take a third of Muon's time.
    """

    def __init__(self, modules: list[nn.Module], matrix_lr: float, other_lr: float, steps: int) -> None:
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        parameters = {id(p): (n, p) for module in modules for n, p in module.named_parameters()}
        for name, parameter in parameters.values():
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name and "merger" not in name
            (matrices if is_matrix else others).append(parameter)
        self._optimizers = (
            torch.optim.Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=0.0),
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
    """bfloat16 for matrix products; weights and norms stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def answer_logits(model: Qwen2_5_VLForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, V] before every answer token of ``batch``, the tokens [R], and the row [R] each belongs to."""
    vision = {}
    if batch.patches is not None:
        vision = {"pixel_values": batch.patches.pixels, "image_grid_thw": batch.patches.grids}
    with half_precision(batch.ids.device):
        states = model.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **vision)[0]
        wanted = batch.labels[:, 1:]
        rows, columns = (wanted != IGNORED).nonzero(as_tuple=True)
        logits = model.lm_head(states[rows, columns])
    return logits.float(), wanted[rows, columns], rows


def train(
    model: Qwen2_5_VLForConditionalGeneration,
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

    The vision tower stays as it is: as long as the language model makes nothing of the pictures, its gradients are
    noise, and Muon, which gives every matrix an update of the same size, would wreck it.
    """
    model.train()
    model.model.visual.requires_grad_(False)
    optimizers = Optimizers([model.model.language_model], matrix_lr, other_lr, steps)
    for step in range(steps):
        logits, wanted, _ = answer_logits(model, encoder.batch(course.items(step, rng)).to(device))
        loss = F.cross_entropy(logits, wanted)
        loss.backward()
        optimizers.step(step)
        report(loss.item())
    model.eval()
