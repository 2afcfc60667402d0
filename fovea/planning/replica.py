"""What a training step keeps for its backward pass, measured on small copies of the drafter.

A formula per drafter would be wrong by the first change of its code. Instead the code that trains runs on copies of a
sixteenth and an eighth of the width, over a few short samples, and every tensor that autograd keeps is counted. What
a sample keeps is c + t T + a A + n N + x A N bytes, each rate a straight line over the width: five samples on each of
two copies give them all. The part c, to which no sample adds (weights in another number format), is left out.

Legend: ``T`` tokens, ``A`` answer tokens, ``N`` visual tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.artifacts.size import SampleLengths
from fovea.drafters.registry import build_drafter
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.training.module import DrafterModule, UnrollConfig
from fovea.training.objective import ObjectiveConfig

#: Divisors of the width, and (T, A, N) of the samples: one that is longer in each way, and one longer in A and N.
_DIVISORS = (16, 8)
_SAMPLES = ((200, 16, 60), (280, 16, 60), (200, 32, 60), (200, 16, 120), (200, 32, 120))
_VOCABULARY = 64


@dataclass(frozen=True)
class Precision:
    """Number formats of training: of weights, gradients and optimizer state, and of products under autocast."""

    weights: torch.dtype
    products: torch.dtype | None = None

    @staticmethod
    def named(name: str) -> Precision:
        """That of Lightning's ``name``, such as bf16-mixed."""
        bits, _, kind = name.partition("-")
        half = {"bf16": torch.bfloat16, "16": torch.float16}.get(bits)
        if half is None:
            return Precision(torch.float64 if bits == "64" else torch.float32)
        return Precision(torch.float32, half) if kind == "mixed" else Precision(half)


@dataclass(frozen=True)
class Trained:
    """What is trained, and how: all that the kept bytes depend on beside the lengths of samples."""

    name: str
    spec: TargetSpec
    config: Any
    objective: ObjectiveConfig
    steps: int
    precision: Precision


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a sample keeps from its forward to its backward pass; ``rates`` are t, a, n and x above."""

    rates: tuple[float, ...]

    def of(self, lengths: SampleLengths) -> int:
        """Those of a sample of ``lengths``."""
        terms = _terms(lengths.tokens, lengths.answer, lengths.visual)[1:]
        return round(sum(rate * term for rate, term in zip(self.rates, terms, strict=False)))


def kept_bytes(trained: Trained, *, with_pictures: bool) -> KeptBytes:
    """The rates of samples with pictures or without; without, a drafter may do less for every token."""
    samples = [SampleLengths(t, n, a) for t, a, n in _SAMPLES]
    if not with_pictures:
        samples = [replace(sample, visual=0) for sample in samples[:3]]
    terms = np.array([_terms(s.tokens, s.answer, s.visual)[: len(samples)] for s in samples], dtype=np.float64)
    first, second = _divisors(trained.spec)
    small, larger = (
        np.linalg.solve(terms, [measure_kept_bytes(_narrow(trained, divisor), sample) for sample in samples])
        for divisor in (first, second)
    )
    slope = (larger - small) / (1 / second - 1 / first)
    full = larger + slope * (1 - 1 / second)
    return KeptBytes(tuple(full[1:].tolist()))


def measure_kept_bytes(trained: Trained, lengths: SampleLengths) -> int:
    """The same by running forward pass and losses over a random sample, on the host; storages are counted once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        spec = trained.spec
        matrix = torch.randn(spec.vocab_size, spec.hidden_size)
        head = TargetHead(matrix, matrix, torch.ones(spec.hidden_size))
        # Which tokens are drafted costs nothing that a sample adds to, and there is no vocabulary to choose from here.
        config = replace(trained.config, draft_vocabulary=None)
        drafter = build_drafter(trained.name, spec, config, head).to(trained.precision.weights)
        module = DrafterModule(drafter, trained.objective, torch.optim.SGD, unroll=UnrollConfig(steps=trained.steps))
        batch = TeacherBatch.collate([_sample(spec, lengths, drafter.feature_layers)])
        products = trained.precision.products
        autocast = torch.autocast("cpu", products) if products else nullcontext()
        with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # All that a training step does before its backward pass, but for what it logs.
            module.validation_step(batch, 0)
    return sum(storage.nbytes() for storage in storages.values())


def _terms(tokens: int, answer: int, visual: int) -> list[int]:
    return [1, tokens, answer, visual, answer * visual]


def _divisors(spec: TargetSpec) -> tuple[int, int]:
    """Two divisors that leave whole, even head widths."""
    for first, second in (_DIVISORS, (8, 4), (4, 2), (2, 1)):
        if spec.head_dim % (2 * first) == 0 and all(n % first == 0 for n in (spec.hidden_size, spec.intermediate_size)):
            return first, second
    raise ValueError(f"a target of head width {spec.head_dim} cannot be made narrower; head widths are multiples of 4")


def _narrow(trained: Trained, divisor: int) -> Trained:
    spec = trained.spec
    narrow = replace(
        spec,
        hidden_size=spec.hidden_size // divisor,
        intermediate_size=spec.intermediate_size // divisor,
        head_dim=spec.head_dim // divisor,
        vocab_size=_VOCABULARY,
        rope=RopeSpec(spec.rope.theta),
        eos_ids=(0,),
        placeholder_ids=(),
    )
    return replace(trained, spec=narrow)


def _sample(spec: TargetSpec, lengths: SampleLengths, layers: tuple[int, ...]) -> TeacherSample:
    """A random sample: a token, the picture, the question, the answer; with outputs of ``layers`` if there are any."""
    place = torch.arange(lengths.tokens)
    is_visual = (place >= 1) & (place <= lengths.visual) & (place < lengths.tokens - lengths.answer)
    width = spec.hidden_size
    return TeacherSample(
        key="planned",
        ids=torch.randint(spec.vocab_size, (lengths.tokens,)),
        positions=place.expand(spec.rope.axes, -1),
        answer_mask=place >= lengths.tokens - lengths.answer,
        is_visual=is_visual,
        last=torch.randn(lengths.tokens, width),
        mid=torch.randn(lengths.answer, width),
        visual=torch.randn(int(is_visual.sum()), width),
        importance=torch.rand(int(is_visual.sum())),
        features=torch.randn(lengths.tokens, len(layers) * width) if layers else None,
        feature_layers=layers,
    )
