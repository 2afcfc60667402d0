"""The recipe: first the vision tower learns to name cells, then a shallow model to answer, then a deep one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from fovea.targets.tiny.batches import IGNORED, Batch, Encoder
from fovea.targets.tiny.families import sample_scene, shuffled_turns
from fovea.targets.tiny.scenes import Board, Chart, Pair, Scene, Strings, Table, Text

#: Called after every optimizer step with the loss.
Report = Callable[[float], None]


@dataclass(frozen=True)
class Diet:
    """What a training stage feeds: kinds of scenes, and how many conversations of each kind a batch holds.

    Stages take the batches in turn; a batch holds pictures of few sizes, so that little of it is padding.
    """

    batches: tuple[tuple[tuple[Callable[[np.random.Generator], Scene], int], ...], ...]

    def items(self, rng: np.random.Generator, max_turns: int) -> Iterator[list]:
        """Batches of (pictures, turns) without end."""
        while True:
            for batch in self.batches:
                items = []
                for sampler, count in batch:
                    for _ in range(count):
                        scene = sample_scene(sampler, "train", rng)
                        items.append((scene.draw(rng), shuffled_turns(scene, rng)[:max_turns]))
                yield items


def _large_strings(rng: np.random.Generator) -> Scene:
    return Strings.sample(rng, 8)


DIET = Diet(
    (
        ((Board.sample, 8), (Chart.sample, 3), (Strings.sample, 3), (Text.sample, 2)),
        ((Board.sample, 8), (Pair.sample, 4), (Strings.sample, 2)),
        ((_large_strings, 4), (Table.sample, 4)),
    )
)


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
    diet: Diet,
    *,
    steps: int,
    matrix_lr: float,
    other_lr: float,
    max_turns: int,
    rng: np.random.Generator,
    device: torch.device,
    report: Report,
) -> None:
    """Trains ``model`` on answers, ``steps`` optimizer steps."""
    model.train()
    optimizers = Optimizers([model], matrix_lr, other_lr, steps)
    for step, items in zip(range(steps), diet.items(rng, max_turns), strict=False):
        logits, wanted, _ = answer_logits(model, encoder.batch(items).to(device))
        loss = F.cross_entropy(logits, wanted)
        loss.backward()
        optimizers.step(step)
        report(loss.item())
    model.eval()
