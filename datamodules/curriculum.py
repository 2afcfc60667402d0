"""A curriculum over the share of pictures: the order of samples as a function of seed, epoch and place alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from datamodules.conversation_source import ConversationSource
from datamodules.epochs import EpochSampler
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.reading import IndexedArtifacts


@dataclass(frozen=True)
class Curriculum:
    """Texts first, then ever more pictures (MSD).

    Attributes:
        text_share: share of the training, in [0, 1), that learns from samples without a picture alone. In the rest the
            probability that the next sample has one rises linearly from 0 to 1.
    """

    text_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.text_share < 1:
            raise ValueError(f"curriculum.text_share is {self.text_share}; a share lies in [0, 1)")

    def picture_share(self, progress: Tensor) -> Tensor:
        """Probability that a sample has a picture when a share ``progress`` of the training is done."""
        return ((progress - self.text_share) / (1 - self.text_share)).clamp(0, 1)


class CurriculumSampler(EpochSampler):
    """Numbers of the samples of an epoch, evenly for all ranks.

    Samples with and without a picture are each taken in random order, again from the start when all have been taken. An
    epoch can be run again, or gone on with in another process, and is the same.

    Args:
        pictured: per sample, whether it has a picture; there must be some of both kinds.
        length: samples of an epoch, over all ranks.
        curriculum: when which kind is taken.
        epochs: epochs of the whole training; asked when an epoch begins.
        num_replicas: ranks.
        rank: of this process.
        seed: of the orders and of the choice of the kind.
    """

    def __init__(
        self,
        pictured: Sequence[bool],
        length: int,
        curriculum: Curriculum,
        epochs: Callable[[], float],
        *,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(length, num_replicas=num_replicas, rank=rank, seed=seed)
        kinds = torch.tensor(pictured, dtype=torch.bool)
        self._texts, self._pictures = (~kinds).nonzero()[:, 0], kinds.nonzero()[:, 0]
        self._curriculum, self._epochs = curriculum, epochs
        self._begun_for: tuple[int, float] | None = None

    def begin_at(self, epoch: int, taken: int, rule: dict[str, Any] | None = None) -> None:
        """As :meth:`EpochSampler.begin_at`; the epoch goes on as for a training as long as it was begun for."""
        super().begin_at(epoch, taken, rule)
        self._begun_for = (epoch, rule["epochs"]) if rule and "epochs" in rule else None

    def rule(self) -> dict[str, Any]:
        """Beside what every order depends on, the share of texts."""
        return {**super().rule(), "text_share": self._curriculum.text_share}

    def state(self) -> dict[str, Any]:
        """The rule, and the epochs that the training is thought to have."""
        return {**self.rule(), "epochs": self._length_of_training()}

    def _length_of_training(self) -> float:
        """Epochs. With max_steps they depend on the ranks, and an epoch under way must not."""
        begun = self._begun_for
        return begun[1] if begun and begun[0] == self.epoch else self._epochs()

    def _order(self) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        progress = (self.epoch + torch.arange(self.length) / self.length) / self._length_of_training()
        chosen = torch.rand(self.length, generator=draw) < self._curriculum.picture_share(progress)
        order = torch.empty(self.length, dtype=torch.int64)
        for places, samples in ((chosen, self._pictures), (~chosen, self._texts)):
            order[places] = _shuffled(samples, int(places.sum()), draw)
        return order


class Mixed(ConcatDataset[Any]):
    """What a curriculum is taken from: ``train`` and, if there are any, ``texts``.

    An epoch is as long as one without texts.

    Args:
        train: conversations or local artifacts, or a part of them.
        texts: more of them.
        curriculum: when which kind is taken.

    Raises:
        ArtifactError: all have a picture, or none has, or artifacts are streamed.
    """

    def __init__(self, train: Any, texts: Any, curriculum: Curriculum) -> None:
        parts = [train] if texts is None else [train, texts]
        self._pictured = [kind for part in parts for kind in _pictured(part)]
        if len(set(self._pictured)) < 2:
            missing, remedy = ("without", "data.texts") if all(self._pictured) else ("with", "data.train")
            raise ArtifactError(
                "a curriculum goes from conversations without pictures to those with some, and there is none "
                f"{missing} a picture: name some in {remedy}, or set data.loader.curriculum=null"
            )
        super().__init__(parts)
        self._length, self._curriculum = len(train), curriculum

    def sampler(self, trainer: Any, *, batch_size: int, seed: int) -> CurriculumSampler:
        """The order of the training that ``trainer`` runs, or is to run."""

        def epochs() -> float:
            whole = [float(trainer.max_epochs)] if (trainer.max_epochs or -1) > 0 else []
            if trainer.max_steps > 0:
                batches = trainer.max_steps * trainer.accumulate_grad_batches
                whole.append(batches * batch_size * trainer.world_size / self._length)
            if not whole:
                raise ArtifactError("a curriculum ends with the training: set trainer.max_epochs or trainer.max_steps")
            return min(whole)

        ranks = {"num_replicas": trainer.world_size, "rank": trainer.global_rank} if trainer else {}
        return CurriculumSampler(self._pictured, self._length, self._curriculum, epochs, seed=seed, **ranks)


def _pictured(part: Any) -> list[bool]:
    """Per sample of ``part``, whether it has a picture."""
    if isinstance(part, Subset):
        whole = _pictured(part.dataset)
        return [whole[number] for number in part.indices]
    if isinstance(part, ConversationSource):
        return [bool(conversation.images) for conversation in part]
    if isinstance(part, IndexedArtifacts):
        return [entry.visual > 0 for entry in part.entries]
    raise ArtifactError(
        "a curriculum takes samples by number, so it needs local artifacts: copy the shards, or set "
        "data.loader.curriculum=null"
    )


def _shuffled(samples: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """``count`` of ``samples`` in random order: each once before any comes again."""
    rounds = -(-count // len(samples))
    orders = [torch.randperm(len(samples), generator=draw) for _ in range(rounds)]
    return samples[torch.cat(orders)[:count]] if orders else samples[:0]
