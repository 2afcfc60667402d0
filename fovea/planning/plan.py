"""The plan of a run: everything that can be known of it from its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fovea.artifacts.config import ExportConfig
from fovea.artifacts.size import SampleLengths, sample_bytes
from fovea.decoding.growth import TreeConfig
from fovea.drafters.base import Drafter
from fovea.drafters.registry import build_drafter
from fovea.files import write_text
from fovea.planning.memory import GIB, Phase, Planned, evaluating, exporting, optimizer_state, training
from fovea.planning.replica import Precision, Trained, kept_bytes
from fovea.planning.updates import Batching, Updates
from fovea.targets.architecture import Architecture
from fovea.targets.head import TargetHead
from fovea.training.objective import ObjectiveConfig

PLAN = "plan.json"


@dataclass(frozen=True)
class Run:
    """The settings that a plan is made from.

    Attributes:
        drafter: name and config of the drafter.
        precision: Lightning's name of the number formats of training.
        target_dtype: number format of the target's weights.
        optimizer: makes the optimizer from parameters.
        steps: unrolled draft steps.
        max_new_tokens: of an answer while speed is measured.
        samples: to train on.
        lengths: of a typical sample.
        picture_bytes: its encoded pictures, where they are stored in the place of visual tokens; None where not.
        online: the live target teaches in the training step, and no artifacts are stored.
        on_gpu: whether devices are GPUs.
        device_bytes: memory of a device; None if nobody said.
    """

    architecture: Architecture
    drafter: tuple[str, Any]
    objective: ObjectiveConfig
    precision: str
    target_dtype: torch.dtype
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    max_anchors: int | None
    batching: Batching
    updates: Updates
    export: ExportConfig
    tree: TreeConfig
    max_new_tokens: int
    samples: int
    lengths: SampleLengths
    picture_bytes: int | None
    online: bool
    on_gpu: bool
    device_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """What a run will take.

    Attributes:
        parameters: trainable parameters by part of the drafter, and ``total``.
        target_parameters: those of the target by part, and ``total``.
        lengths, longest: of a typical sample, and of the longest that the export and the target's context allow.
        sample_bytes, artifact_bytes: on disk, of a typical sample and of all.
        typical, longest_phases: memory by phase for samples of either length.
        host_bytes: host memory that the target takes between two evaluations, over all devices; 0 online,
            where it stays on them.
        device_bytes: memory of a device; None if nobody said.
    """

    parameters: dict[str, int]
    target_parameters: dict[str, int]
    samples: int
    lengths: SampleLengths
    longest: SampleLengths
    sample_bytes: int
    artifact_bytes: int
    batching: Batching
    updates: Updates
    typical: tuple[Phase, ...]
    longest_phases: tuple[Phase, ...]
    host_bytes: int
    device_bytes: int | None

    def fits(self, phase: Phase) -> bool | None:
        """Whether a device holds the phase; None if its memory is not known."""
        return None if self.device_bytes is None else phase.total <= self.device_bytes

    def write(self, folder: Path) -> None:
        """Writes ``plan.json`` into ``folder``: all of it in plain numbers, bytes throughout."""
        values = asdict(self)
        for name in ("typical", "longest_phases"):
            values[name] = {
                phase.name: {"parts": phase.parts, "total": phase.total, "fits": self.fits(phase)}
                for phase in getattr(self, name)
            }
        write_text(folder / PLAN, json.dumps(values, indent=2) + "\n")

    def numbers(self) -> dict[str, float]:
        """The headline numbers."""
        peak = max(phase.total for phase in self.longest_phases)
        return {
            "parameters": float(self.parameters["total"]),
            "artifact_gb": self.artifact_bytes / 1e9,
            "updates": float(self.updates.total),
            "peak_gib": peak / GIB,
        }


def weightless_drafter(name: str, config: Any, architecture: Architecture) -> Drafter:
    """The drafter for a target of ``architecture``, built by the code that trains, without memory for its weights."""
    with torch.device("meta"):
        matrix = torch.empty(architecture.vocab_size, architecture.hidden_size)
        head = TargetHead(matrix, matrix, torch.empty(architecture.hidden_size))
        return build_drafter(name, architecture.spec(), config, head)


def make_plan(run: Run) -> Plan:
    """The plan of ``run``."""
    architecture = run.architecture
    name, config = run.drafter
    drafter = weightless_drafter(name, config, architecture)
    spec = drafter.spec
    parameters = drafter.trainable_parameters()
    layers = [module for module in drafter.modules() if isinstance(module, nn.Linear)]
    precision = Precision.named(run.precision)
    trained = Trained(name, spec, config, run.objective, run.steps, precision)
    planned = Planned(
        architecture=architecture,
        target_dtype=run.target_dtype,
        weights=sum(weight.numel() for weight in drafter.parameters()),
        trainable=parameters["total"],
        widest=max((layer.in_features + layer.out_features for layer in layers), default=0),
        cache_numbers=2 * drafter.cache_layers * drafter.num_kv_heads * spec.head_dim,
        kept=kept_bytes(trained, with_pictures=run.lengths.visual > 0),
        precision=precision,
        optimizer_state=optimizer_state(run.optimizer, precision.weights),
        batch=run.batching.per_device,
        devices=run.batching.devices,
        chunk_rows=run.objective.chunk_rows,
        max_anchors=run.max_anchors,
        features=len(drafter.feature_layers),
        online=run.online,
        sees_again=run.picture_bytes is not None,
        export_batch=run.export.batch_size,
        max_new_tokens=(run.export.max_new_tokens, run.max_new_tokens),
        tree=run.tree,
        on_gpu=run.on_gpu,
    )
    longest = _longest(
        run.lengths, min(run.export.max_tokens or architecture.max_positions, architecture.max_positions)
    )
    per_sample = sample_bytes(
        run.lengths,
        architecture.hidden_size,
        architecture.rotary_axes,
        run.export.dtype,
        features=len(run.export.feature_layers),
        picture_bytes=run.picture_bytes,
    )
    return Plan(
        parameters=parameters,
        target_parameters={
            "decoder layers": architecture.num_layers * architecture.layer_parameters,
            "embedding, LM head, norm": architecture.head_parameters,
            "vision tower and projector": architecture.vision_parameters,
            "total": architecture.parameters,
        },
        samples=run.samples,
        lengths=run.lengths,
        longest=longest,
        sample_bytes=per_sample,
        artifact_bytes=0 if run.online else per_sample * run.samples,
        batching=run.batching,
        updates=run.updates,
        typical=_phases(planned, run.lengths),
        longest_phases=_phases(planned, longest),
        host_bytes=0 if run.online else run.batching.devices * architecture.parameters * run.target_dtype.itemsize,
        device_bytes=run.device_bytes,
    )


def _phases(planned: Planned, lengths: SampleLengths) -> tuple[Phase, ...]:
    stored = () if planned.online else (exporting(planned, lengths),)
    return (
        *stored,
        training(planned, lengths),
        evaluating(planned, lengths, within_training=True),
        evaluating(planned, lengths, within_training=False),
    )


def _longest(typical: SampleLengths, max_tokens: int) -> SampleLengths:
    """A sample of ``max_tokens``, in the proportions of the typical one."""
    if max_tokens <= typical.tokens:
        return typical
    times = max_tokens / typical.tokens
    return SampleLengths(max_tokens, int(typical.visual * times), int(typical.answer * times))
