"""Memory per device in the phases of a job: while artifacts are exported, while training, while speed is measured.

What a phase holds is counted: weights, gradients, optimizer state, caches, kept activations. What passes through it is
estimated by the factors below, and nothing is estimated of how a memory allocator wastes.

Legend: ``B`` samples of a micro-batch, ``T`` tokens, ``D`` hidden width, ``I`` width of the MLP, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fovea.artifacts.size import SampleLengths
from fovea.decoding.growth import TreeConfig
from fovea.planning.replica import KeptBytes, Precision
from fovea.targets.architecture import Architecture

GIB = 2**30
#: What a GPU's driver and libraries take before the first tensor.
_CONTEXT = 1 * GIB
#: Chunks of logits [rows, V] in float32 that the losses hold at once: draft and teacher, what they are made from and
#: spread to, and their gradient.
_LOGIT_CHUNKS = 5
#: Gradients of the widest layer's input and output that are alive at once in backward.
_PASSING_GRADIENTS = 2
#: Scores whose entropy is taken at once (see fovea.targets.attention), 16 M of them, in four shapes of float32.
_ENTROPY = 4 * 4 * (1 << 24)


@dataclass(frozen=True)
class Phase:
    """What a device holds in a phase of the job, in bytes by name."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Planned:
    """A run, as far as its memory depends on it.

    Attributes:
        architecture: of the target.
        target_dtype: number format of the target's weights.
        weights: numbers in all parameters of the drafter.
        trainable: numbers in those that are trained.
        widest: input and output width of the drafter's largest layer together.
        cache_numbers: keys and values per token of the drafter's cache.
        kept: what a sample keeps for the backward pass.
        precision: of training.
        optimizer_state: bytes per trained number.
        batch: B.
        devices: that train.
        chunk_rows: rows whose logits are in memory at once.
        max_anchors: most anchors of a micro-batch; None for all.
        features: feature layers of the target that the drafter reads.
        online: the whole target teaches in the training step.
        sees_again: its vision tower makes the visual tokens of every batch that is read.
        export_batch: conversations per forward pass of the export.
        max_new_tokens: tokens of an answer, in the export and in the speed evaluation.
        tree: draft tree.
        on_gpu: whether the devices are GPUs.
    """

    architecture: Architecture
    target_dtype: torch.dtype
    weights: int
    trainable: int
    widest: int
    cache_numbers: int
    kept: KeptBytes
    precision: Precision
    optimizer_state: float
    batch: int
    devices: int
    chunk_rows: int
    max_anchors: int | None
    features: int
    online: bool
    sees_again: bool
    export_batch: int
    max_new_tokens: tuple[int, int]
    tree: TreeConfig
    on_gpu: bool


def exporting(run: Planned, lengths: SampleLengths) -> Phase:
    """While the target answers and teaches."""
    size = run.target_dtype.itemsize
    rows = run.export_batch * (lengths.tokens + run.max_new_tokens[0])
    return Phase(
        "export",
        {
            "target": run.architecture.parameters * size,
            "caches": rows * run.architecture.cache_numbers * size,
            "forward pass": _teaching(run, run.export_batch, lengths),
            **_context(run),
        },
    )


def training(run: Planned, lengths: SampleLengths) -> Phase:
    """While the drafter trains on micro-batches whose samples all have ``lengths``."""
    size = run.precision.weights.itemsize
    copies = _held(run)
    anchored = lengths
    if run.max_anchors is not None:
        answer = min(lengths.answer, -(-run.max_anchors // run.batch))
        anchored = SampleLengths(lengths.tokens, lengths.visual, answer)
    products = (run.precision.products or run.precision.weights).itemsize
    passing = (
        run.batch * run.kept.of(anchored)
        + _PASSING_GRADIENTS * run.batch * lengths.tokens * run.widest * products
        + _LOGIT_CHUNKS * run.chunk_rows * run.architecture.vocab_size * 4
    )
    if run.precision.products is not None:
        copies["weights for autocast"] = run.weights * products
    # As the artifacts bring them, two bytes a number as a rule, and once more in the number format of the weights.
    rows = lengths.tokens * (1 + run.features) + lengths.visual + lengths.answer
    states = run.batch * rows * run.architecture.hidden_size
    if run.online:
        copies["target"] = run.architecture.parameters * run.target_dtype.itemsize
        copies["forward pass"] = _teaching(run, run.batch, lengths)
    # An update makes a copy of the optimizer's state when the activations are gone.
    return Phase(
        "training",
        copies
        | {
            "batch": states * (2 + size),
            "activations": max(passing, run.trainable * size),
            **_context(run),
        },
    )


def evaluating(run: Planned, lengths: SampleLengths, *, within_training: bool) -> Phase:
    """While one prompt is decoded; ``within_training`` what is trained stays on the device."""
    size = run.target_dtype.itemsize
    prompt = lengths.tokens - lengths.answer
    rows = prompt + run.max_new_tokens[1] + run.tree.nodes
    tree_rows = 1 + run.tree.width * run.tree.passes
    return Phase(
        "speed evaluation" if within_training else "evaluate.py",
        (_held(run) if within_training else {})
        | {
            "target": run.architecture.parameters * size,
            "drafter's copy": run.weights * size,
            "caches": (rows * run.architecture.cache_numbers + (rows + tree_rows) * run.cache_numbers) * size,
            "forward pass": prompt * _passing_numbers(run.architecture) * size,
            **_context(run),
        },
    )


def optimizer_state(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Bytes of optimizer state per trained number, found by one update of a parameter of a few thousand."""
    parameter = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1) / parameter.numel()


def _held(run: Planned) -> dict[str, int]:
    """What training keeps from step to step."""
    size = run.precision.weights.itemsize
    # DDP sums gradients in buckets of its own.
    gradients = run.trainable * size * (2 if run.devices > 1 else 1)
    tower = {"target's vision tower": run.architecture.vision_parameters * run.target_dtype.itemsize}
    return {
        "target's embedding and LM head": run.architecture.head_parameters * run.target_dtype.itemsize,
        **(tower if run.sees_again else {}),
        "drafter": run.weights * size,
        "gradients": gradients,
        "optimizer state": round(run.trainable * run.optimizer_state),
    }


def _teaching(run: Planned, batch: int, lengths: SampleLengths) -> int:
    """What passes through the target while it teaches ``batch`` conversations."""
    numbers = _passing_numbers(run.architecture) + run.features * run.architecture.hidden_size
    return batch * lengths.tokens * numbers * run.target_dtype.itemsize + _ENTROPY


def _passing_numbers(architecture: Architecture) -> int:
    """Numbers per token that are alive at once within a decoder layer: residual, norms, heads and the MLP's three."""
    heads = architecture.num_heads + 2 * architecture.num_kv_heads
    return 4 * architecture.hidden_size + heads * architecture.head_dim + 3 * architecture.intermediate_size


def _context(run: Planned) -> dict[str, int]:
    return {"driver and libraries": _CONTEXT} if run.on_gpu else {}
