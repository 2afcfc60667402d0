"""Trains a drafter on what its target teaches, under Lightning.

The loss of an optimizer step is a weighted mean over the supervised rows of *all* its micro-batches and ranks. Each
micro-batch backpropagates its own weighted sum; Lightning divides by the number of micro-batches and DDP by the number
of ranks; before clipping, the gradient is scaled by both numbers over the global sum of weights. So one process with
batch 8, two micro-batches of 4 and two ranks with 4 each take the same step, whatever part of the rows each holds. It
is the same where the gradient lies in parts on the ranks (:mod:`fovea.training.zero`, :mod:`fovea.training.sharding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from fovea.drafters.base import Drafter
from fovea.drafters.checkpoint import Teaching
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.draft_vocabulary import within_vocabulary
from fovea.training.loss_sums import Losses, LossSums
from fovea.training.objective import ObjectiveConfig, ObjectiveSums, objective
from fovea.training.schedules import ScheduleFactory
from fovea.training.sharding import ShardedStrategy
from fovea.training.unroll import Unrolled, unroll
from fovea.training.zero import ZeroStrategy

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], Optimizer]


class DivergedError(RuntimeError):
    """The gradient is not a finite number any more."""


@dataclass(frozen=True)
class UnrollConfig:
    """How far training unrolls the drafter.

    Attributes:
        steps: steps from each anchor; None takes D + 1, as many as decoding has depths.
        max_anchors: most anchors of a micro-batch, drawn anew each time; None takes all. Bounds memory.
        seed: of that draw.
    """

    steps: int | None = None
    max_anchors: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "max_anchors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"unroll.{name} is {value}; it must be 1 or more, or null")


class DrafterModule(L.LightningModule):
    """Optimizes the parameters of ``drafter``; nothing of the target is in it, in its optimizer or its checkpoints.

    Args:
        drafter: the trained part; its ``head`` is the target's and moves along as a plain attribute.
        objective: coefficients.
        optimizer: makes the optimizer from the trainable parameters.
        scheduler: makes the schedule from the optimizer and ``total_steps=``; None keeps the rate.
        unroll: how far and from how many anchors.
        teaching: what the artifacts were made with; kept in checkpoints, and compared when one is resumed.
    """

    def __init__(
        self,
        drafter: Drafter,
        objective: ObjectiveConfig,
        optimizer: OptimizerFactory,
        scheduler: ScheduleFactory | None = None,
        unroll: UnrollConfig | None = None,
        teaching: Teaching | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective_config = objective
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.unroll_config = unroll or UnrollConfig()
        self.teaching = teaching or Teaching()
        self.steps = self.unroll_config.steps or drafter.config.depth + 1
        if self.steps > drafter.config.depth + 1:
            raise ValueError(
                f"unroll.steps is {self.steps} and the drafter has depths 0 to {drafter.config.depth}; "
                f"unroll at most {drafter.config.depth + 1} steps or raise drafter.depth"
            )
        self._window = LossSums(self.steps)
        self._validation = LossSums(self.steps)
        self._micro_batch = self._stepped_micro_batch = 0

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_factory(p for p in self.drafter.parameters() if p.requires_grad)
        if self.scheduler_factory is None:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        scheduler = self.scheduler_factory(optimizer, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_model(self) -> None:
        if isinstance(strategy := self.trainer.strategy, ShardedStrategy):
            strategy.shard(self, self.drafter)

    def on_fit_start(self) -> None:
        self._move_head()
        token_ids = self.drafter.token_ids
        if token_ids is not None and int(token_ids[0]) < 0:
            # Every rank counts the same artifacts.
            artifacts: Any = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            self.drafter.choose_vocabulary(artifacts.answer_token_counts(self.drafter.spec.vocab_size))

    def on_validation_start(self) -> None:
        self._move_head()

    def training_step(self, batch: TeacherBatch, batch_idx: int) -> Tensor:
        unrolled, sums = self._losses(batch, draw=self._micro_batch)
        self._micro_batch += 1
        self._window.add(sums, unrolled.step)
        if unrolled.retrieval.numel():
            self.log("train/retrieval_k", unrolled.retrieval[:, 0].float().mean())
        for name, figures in unrolled.notes.items():
            self.log(f"train/{name}", figures.mean())
        if self.trainer.world_size == 1 and unrolled.anchors:
            return sums.loss_sum
        loss = sums.loss_sum + self._touch_all() + self._idle()
        if isinstance(strategy := self.trainer.strategy, ZeroStrategy):
            return strategy.in_order(loss, self.drafter.parameters())
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        zero = strategy if isinstance(strategy := self.trainer.strategy, ZeroStrategy) else None
        self._stepped_micro_batch = self._micro_batch
        losses = self._window.pop(self._sum_over_ranks)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if losses is None or losses.Z == 0:
            # Not a zero gradient: momentum and weight decay would still move the weights.
            for parameter in parameters:
                parameter.grad = None
            return
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / losses.Z
        gradients = zero.gradients() if zero else [_local(p.grad) for p in parameters]
        for gradient in gradients:
            gradient.mul_(scale)
        norm = zero.total_norm(gradients) if zero else _whole(get_total_norm([p.grad for p in parameters]))
        if not norm.isfinite():
            raise DivergedError(
                f"the gradient is not finite in optimizer step {self.trainer.global_step + 1}; the last checkpoint is "
                "sound: resume from it with a lower optimizer.lr or a longer warm-up"
            )
        self._log(losses, norm, optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: TeacherBatch, batch_idx: int) -> None:
        unrolled, sums = self._losses(batch, draw=batch_idx)
        self._idle()
        self._validation.add(sums, unrolled.step)

    def on_validation_epoch_end(self) -> None:
        losses = self._validation.pop(self._sum_over_ranks)
        if losses is not None:
            self.log_dict(losses.named("val"), on_epoch=True, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Micro-batches whose gradients have moved no weight yet are run again.
        checkpoint["micro_batch"] = self._stepped_micro_batch
        checkpoint["drafter"] = self._record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another target, of other artifacts or of other layers read; the weights are compared
        by Lightning."""
        stored, own = checkpoint["drafter"], self._record()
        parts = {
            "target": "model settings (model=, model.path=)",
            "teaching": "model and data settings (model.path=, model.mid_layers=, data.export)",
            "reads": "drafter settings (drafter.feature_layers=)",
        }
        for part, remedy in parts.items():
            trained = own[part] | stored.get(part, {})  # older checkpoints do not say everything
            differences = [
                f"{name} was {trained[name]!r} and is {value!r}"
                for name, value in own[part].items()
                if trained[name] != value
            ]
            if differences:
                raise ValueError(
                    f"the checkpoint was trained with something else: {'; '.join(differences)}. "
                    f"Resume with the {remedy} of its run, or train anew without resume="
                )
        self._micro_batch = self._stepped_micro_batch = checkpoint["micro_batch"]

    def _losses(self, batch: TeacherBatch, draw: int) -> tuple[Unrolled, ObjectiveSums]:
        """The micro-batch unrolled from its ``draw``-th choice of anchors, and its sums."""
        config = self.unroll_config
        generator = torch.Generator()
        generator.manual_seed((config.seed * 1_000_003 + draw) * 4096 + self.global_rank)
        batch = batch.to(self.device, self.drafter.dtype)
        unrolled = unroll(self.drafter, batch, steps=self.steps, max_anchors=config.max_anchors, generator=generator)
        unrolled = within_vocabulary(unrolled, self.drafter)
        sums = objective(
            unrolled.h_hat,
            unrolled.h_mid,
            unrolled.step,
            unrolled.teacher_index,
            unrolled.teacher,
            unrolled.teacher_mid,
            self.drafter.head_rows,
            self.objective_config,
            h_raw=unrolled.h_raw,
            answer_position=unrolled.answer_position,
            draft_head_weight=self.drafter.own_head,
        )
        return unrolled, sums

    def _log(self, losses: Losses, norm: Tensor, rate: float) -> None:
        self.log_dict(losses.named("train") | {"train/grad_norm": norm, "train/lr": rate})
        self.log("loss", losses.terms["loss"], prog_bar=True, logger=False)

    def _record(self) -> dict[str, Any]:
        """What the weights belong to, in plain types."""
        drafter = self.drafter
        return {
            "name": drafter.name,
            "config": asdict(drafter.config),
            "target": asdict(drafter.spec),
            "teaching": asdict(self.teaching),
            "reads": {"feature_layers": drafter.feature_layers},
        }

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(values, reduce_op="sum")

    def _touch_all(self) -> Tensor:
        """Zero, but with a gradient (of zero) for every parameter that is whole.

        DDP waits for the gradient of each on every rank; a rank without pictures has none for the correction. And a
        micro-batch without supervised rows has no graph at all.
        """
        whole = [p for p in self.drafter.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        return torch.stack([p.view(-1)[0] * 0 for p in whole]).sum()

    def _idle(self) -> Tensor | float:
        """Zero, behind calls that ranks with longer answers make and this one has not made."""
        # A plan measures a step without a trainer, and so without other ranks.
        strategy = self.trainer.strategy if self._trainer is not None else None
        return strategy.idle(self.steps) if isinstance(strategy, ShardedStrategy) else 0.0

    def _move_head(self) -> None:
        self.drafter.head = self.drafter.head.to(self.device)


def _local(gradient: Tensor) -> Tensor:
    """The part of ``gradient`` that lies on this rank."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
