"""DeepSpeed's ZeRO under Lightning, with the normalisation of :mod:`fovea.training.module`.

DeepSpeed keeps the averaged gradient to itself, cut into one part per rank, and clips it when it steps. So the gradient
is scaled where it lies, between the last backward pass of a step and the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn


class MissingExtraError(ValueError):
    """An optional package that a setting needs is not installed."""


def require_deepspeed() -> None:
    """Refuses where DeepSpeed is not installed.

    Raises:
        MissingExtraError: it is not.
    """
    if not _DEEPSPEED_AVAILABLE:
        raise MissingExtraError(
            "strategy=deepspeed_zero2 needs DeepSpeed, which is not installed: pip install -e '.[deepspeed]', "
            "or choose strategy=ddp"
        )


class _OwnInputs(DeepSpeedPrecision):
    """Leaves batches alone: the training module converts them, and Lightning's way takes no frozen dataclass."""

    def convert_input(self, data: Any) -> Any:
        return data


class ZeroStrategy(DeepSpeedStrategy):
    """DeepSpeed with the given ``config``; Lightning adds precision and gradient accumulation from the trainer's.

    Lightning divides a loss by the number of micro-batches already, so DeepSpeed does not again; and a window that the
    end of an epoch cuts short ends in a step, as it does without DeepSpeed.

    A window without a supervised token has a gradient of zero, under which momentum still moves the weights; without
    DeepSpeed they rest.

    Args:
        config: DeepSpeed's own.
        settings: of Lightning's strategy.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
    """

    def __init__(self, config: DictConfig | dict[str, Any], **settings: Any) -> None:
        require_deepspeed()
        super().__init__(config=_plain(config), **settings)

    def setup(self, trainer: L.Trainer) -> None:
        self.precision_plugin = _OwnInputs(self.precision_plugin.precision)  # pyright: ignore[reportArgumentType]
        super().setup(trainer)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.deepspeed_engine.set_gradient_accumulation_boundary(not module.trainer.fit_loop._should_accumulate())
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: left to DeepSpeed, no step would end an epoch, and the schedule counts on one."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Every micro-batch sends its gradients: each rank keeps its own part of the sum only."""
        yield

    @staticmethod
    def in_order(loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """A loss with the gradients of ``loss``, which come in the order of ``parameters``; its value is another.

        DeepSpeed sums gradients over ranks in the order in which they come, and takes it to be the same everywhere.
        Here it depends on what a rank's batch holds: pictures, long answers, or neither.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained)
        pairs = zip(trained, gradients, strict=True)
        return torch.stack([torch.dot(weight.flatten(), gradient.flatten()) for weight, gradient in pairs]).sum()

    def gradients(self) -> list[Tensor]:
        """This rank's part of the averaged gradient; what is written into it is what the step takes."""
        parts = self.deepspeed_engine.optimizer.averaged_gradients.values()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        return [gradient for part in parts if part is not None for gradient in part]

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of the gradient over all ranks, of this rank's part :meth:`gradients`."""
        squares = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
        return self.reduce(squares, reduce_op="sum").sqrt()


def _plain(config: DictConfig | dict[str, Any]) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    return dict(plain)  # type: ignore[arg-type]
