"""Online distillation: the live target teaches in the training step, and nothing is stored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning as L
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from datamodules.artifacts import split_by_picture
from datamodules.conversation_source import ConversationSource
from datamodules.curriculum import Mixed
from datamodules.epochs import EpochLoader
from datamodules.identity import in_order_of_keys, samples_digest
from datamodules.loading import LoaderConfig, batches_done, epoch_sampler
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import require_some
from fovea.artifacts.lesson import hash_image
from fovea.artifacts.teaching import ConversationTeacher
from fovea.targets.base import Target
from fovea.targets.conversation import Conversation
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample
from fovea.training.draft_vocabulary import answer_token_counts

logger = logging.getLogger(__name__)


class OnlineDataModule(L.LightningDataModule):
    """Batches that a live target teaches: the same as from artifacts, without their disk and without their rounding.

    Order, split and ranks are those of :class:`datamodules.artifacts.ArtifactDataModule`. The target's own answers
    (``export.answers=target``) are generated when a conversation first comes, and remembered.

    Args:
        load_target: called once, when training begins; the target stays on its device.
        export: whose answers, which layers, and what is left out; storage settings do not matter here.
        train: conversations.
        val: the same for validation; None takes ``loader.val_fraction`` of ``train``, no picture on both sides.
        texts: more to train on under a curriculum: conversations without pictures.
        loader: how batches are made; the target's image processor runs in the training process.

    Raises:
        ArtifactError: ``train`` or ``val`` are finished artifacts.
    """

    def __init__(
        self,
        *,
        load_target: Callable[[], Target],
        export: ExportConfig,
        train: ConversationSource,
        val: ConversationSource | None = None,
        texts: ConversationSource | None = None,
        loader: LoaderConfig | None = None,
    ) -> None:
        super().__init__()
        for name, source in (("data.train", train), ("data.val", val), ("data.texts", texts)):
            if source is not None and not isinstance(source, ConversationSource):
                raise ArtifactError(
                    f"{name} is {source}, finished artifacts, and data.online=true lets the live target teach: "
                    "name conversations, or set data.online=false"
                )
        self._load_target, self.export_config, self.loader = load_target, export, loader or LoaderConfig()
        self.train_source, self.val_source, self.text_source = train, val, texts
        self._teacher: ConversationTeacher | None = None
        self._train: Any = None
        self._val: Any = None

    @property
    def teacher(self) -> ConversationTeacher:
        """What asks the target, which is loaded now if it was not before."""
        if self._teacher is None:
            self._teacher = ConversationTeacher(self._load_target(), self.export_config, keep_answers=True)
        return self._teacher

    def setup(self, stage: str | None = None) -> None:
        """Splits the conversations.

        Raises:
            ArtifactError: there is none.
        """
        if self._train is not None:
            return
        for source in (self.train_source, self.val_source, self.text_source):
            if source is not None:
                require_some(source)
        data, self._val, texts = (
            None if source is None else in_order_of_keys(source)
            for source in (self.train_source, self.val_source, self.text_source)
        )
        assert data is not None, "there is something to train on"
        self._train = data
        if self._val is None and self.loader.val_fraction:
            groups = [_picture(conversation) for conversation in data]
            train, val = split_by_picture(groups, self.loader.val_fraction, self.loader.seed)
            self._train, self._val = Subset(data, train), Subset(data, val) if val else None
        if self.loader.curriculum is not None:
            self._train = Mixed(self._train, texts, self.loader.curriculum)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the epoch that the trainer is in."""
        return self._loader(self._train, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Batches in a fixed order; none if there is nothing to validate on."""
        return [] if self._val is None else self._loader(self._val, shuffle=False)

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """What the conversations are; the target that teaches them is the checkpoint's own matter."""
        sources = {"train": self.train_source, "val": self.val_source}
        return {use: {"data": source.digest()} for use, source in sources.items() if source is not None}

    def answer_token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64 how often each token stands in the answers to train on; one pass of the target over all of them."""
        size = self.loader.batch_size
        batches = (
            [self._train[i] for i in range(start, min(start + size, len(self._train)))]
            for start in range(0, len(self._train), size)
        )
        samples = (taught.sample for batch in batches for taught in self.teacher.teach(batch))
        return answer_token_counts(samples, vocab_size)

    def teardown(self, stage: str | None = None) -> None:
        """Says how many conversations taught nothing, and why."""
        if self._teacher is not None and self._teacher.skipped:
            kinds = Counter(reason.partition(":")[0] for reason in self._teacher.skipped.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            logger.warning("%d conversations gave no sample: %s", len(self._teacher.skipped), counts)

    def _loader(self, data: Any, shuffle: bool) -> DataLoader:
        return _LiveLoader(
            data,
            sampler=epoch_sampler(data, self.trainer, self.loader, shuffle=shuffle),
            batches_done=lambda: batches_done(self.trainer),
            identity=lambda: samples_digest(data),
            batch_size=self.loader.batch_size,
            collate_fn=list,
            teacher=lambda: self.teacher,
        )


class _LiveLoader(EpochLoader):
    """Batches of conversations, taught as they come.

    Ranks must take equally many steps, so a batch of which nothing can be used is replaced by the samples before it.
    """

    def __init__(self, data: Any, *, teacher: Callable[[], ConversationTeacher], **settings: Any) -> None:
        super().__init__(data, **settings)
        self._taught_by = teacher

    def __iter__(self) -> Iterator[TeacherBatch]:
        teacher, last = self._taught_by(), list[TeacherSample]()
        for batch in super().__iter__():
            samples = _teach(teacher, batch) or last or self._earlier(teacher) or self._any(teacher)
            last = samples
            yield TeacherBatch.collate(samples)

    def _earlier(self, teacher: ConversationTeacher) -> list[TeacherSample]:
        """The last batch of those before a resumed one that teaches something; none if the epoch begins here."""
        for batch in self.batches_before():
            if samples := _teach(teacher, [self.dataset[index] for index in batch]):
                return samples
        return []

    def _any(self, teacher: ConversationTeacher) -> list[TeacherSample]:
        """The first conversation that can be used.

        Raises:
            ArtifactError: there is none.
        """
        for index in range(len(self.dataset)):  # pyright: ignore[reportArgumentType]
            if samples := _teach(teacher, [self.dataset[index]]):
                return samples
        raise ArtifactError(f"no conversation can be used; the first: {next(iter(teacher.skipped.items()), 'none')}")


def _teach(teacher: ConversationTeacher, batch: list[Conversation]) -> list[TeacherSample]:
    """What ``batch`` teaches, in host memory, where batches are put together."""
    return [_on_host(taught.sample) for taught in teacher.teach(batch)]


def _picture(conversation: Conversation) -> str:
    """What stands for the first picture of a conversation; the key of one without."""
    if not conversation.images:
        return conversation.key
    first = conversation.images[0]
    return hash_image(first) if isinstance(first, Image.Image) else str(first)


def _on_host(sample: TeacherSample) -> TeacherSample:
    moved: dict[str, Any] = {name: part.cpu() for name, part in vars(sample).items() if isinstance(part, Tensor)}
    return replace(sample, **moved)
