"""Feeds a drafter's training from artifacts, which are exported first where they are missing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from datamodules.conversation_source import ConversationSource
from datamodules.curriculum import Mixed
from datamodules.epochs import EpochLoader, StreamLoader
from datamodules.identity import samples_digest
from datamodules.loading import LoaderConfig, batches_done, epoch_sampler, epoch_under_way
from datamodules.recomputed import PictureCollate, Sight
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.export import export, require_some
from fovea.artifacts.fingerprint import Fingerprint, fingerprint_checkpoint
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.reading import IndexedArtifacts, open_artifacts
from fovea.artifacts.streaming import StreamedArtifacts
from fovea.artifacts.transport import Patience, is_remote
from fovea.targets.base import Target
from fovea.targets.hf import HFTarget
from fovea.targets.teacher_batch import TeacherSample
from fovea.targets.vision import load_vision, require_sight
from fovea.training.draft_vocabulary import answer_token_counts

logger = logging.getLogger(__name__)

#: What artifacts from elsewhere must have in common with the target and the configuration.
_OF_THE_TARGET = ("weights", "processor", "mid_layers", "feature_layers")


class ArtifactDataModule(L.LightningDataModule):
    """Training and validation batches of what a target teaches.

    Conversations are exported in ``prepare_data`` into a folder named by their fingerprint, unless it is there already.
    Local artifacts are read through the indexed door: the whole set is shuffled anew each epoch, the same for the same
    seed and epoch, and ranks get equally many samples. Remote ones are streamed. Where pictures stand for visual
    tokens, the target's vision tower makes these when a batch is read, on the device that trains.

    Args:
        checkpoint: folder of the target; for fingerprints.
        export: how artifacts are made.
        load_target: called only if something must be exported.
        load_vision: loads the vision tower onto a device; None does so in float32.
        require_enough: given the number of conversations to train on before they are exported, raises if training on
            no more samples cannot work; called if all are known.
        train: conversations, or the folder or URL of finished artifacts (see ``fovea.artifacts.transport``).
        val: the same for validation; None takes ``loader.val_fraction`` of local training artifacts, chosen so that no
            picture is on both sides.
        texts: more to train on under a curriculum: conversations without pictures, or local artifacts of some.
        root: folder for exported artifacts, and for copies of streamed shards.
        folder: a fixed folder for the training artifacts; refused if it holds others.
    """

    def __init__(
        self,
        *,
        checkpoint: Path,
        export: ExportConfig,
        load_target: Callable[[], Target],
        train: ConversationSource | str | Path,
        val: ConversationSource | str | Path | None = None,
        texts: ConversationSource | str | Path | None = None,
        root: Path,
        folder: Path | None = None,
        loader: LoaderConfig | None = None,
        progress: bool = True,
        load_vision: Callable[[torch.device], HFTarget] | None = None,
        require_enough: Callable[[int], None] | None = None,
    ):
        super().__init__()
        self._load_vision, self._collate = load_vision, PictureCollate(Path(checkpoint))
        self._sight, self._require_enough = Sight(self._tower), require_enough
        self.checkpoint, self.export_config, self._load_target = Path(checkpoint), export, load_target
        self.train_source, self.val_source = train, val
        curriculum = loader.curriculum if loader else None
        self.text_source = texts if curriculum else None
        self.root, self.folder, self.loader, self.progress = Path(root), folder, loader or LoaderConfig(), progress
        self.train_artifacts: IndexedArtifacts | None = None
        self._opened: dict[str, IndexedArtifacts | StreamedArtifacts] = {}
        self._train: Dataset[TeacherSample] | StreamedArtifacts | None = None
        self._val: Dataset[TeacherSample] | StreamedArtifacts | None = None

    def prepare_data(self) -> None:
        """Exports what is missing.

        Raises:
            ArtifactError: there is no conversation to export.
            FingerprintMismatchError: if ``folder`` holds artifacts of another target, data set or configuration.
            UnsupportedTargetError: visual tokens are to be recomputed, and the target reads text only.
        """
        if self.export_config.visual == "recomputed":
            require_sight(self.checkpoint)
        missing: list[tuple[ConversationSource, Path, Fingerprint]] = []
        for source in (self.train_source, self.val_source, self.text_source):
            if isinstance(source, ConversationSource):
                folder, fingerprint = self.folder_of(source), self._fingerprint(source)
                if (folder / MANIFEST).is_file():
                    Manifest.read(folder).fingerprint.require(fingerprint, str(folder))
                else:
                    require_some(source)
                    missing.append((source, folder, fingerprint))
        if any(source is self.train_source for source, _, _ in missing):
            self._count()
        for source, folder, fingerprint in missing:
            target = self._load_target()
            export(target, source, folder, self.export_config, fingerprint, progress=self.progress)

    def setup(self, stage: str | None = None) -> None:
        """Opens the artifacts and checks that they are the ones of this target and configuration."""
        if self._train is not None:
            return
        self._train = self._opened["train"] = self._open(self.train_source)
        if isinstance(self._train, IndexedArtifacts):
            self.train_artifacts = self._train
        if self.val_source is not None:
            self._val = self._opened["val"] = self._open(self.val_source)
        elif self.train_artifacts is not None and self.loader.val_fraction:
            pictures = [entry.images[0] if entry.images else entry.key for entry in self.train_artifacts.entries]
            train, val = split_by_picture(pictures, self.loader.val_fraction, self.loader.seed)
            self._train = Subset(self.train_artifacts, train)
            self._val = Subset(self.train_artifacts, val) if val else None
        if self.loader.curriculum is not None:
            texts = None if self.text_source is None else self._open(self.text_source)
            self._train = Mixed(self._train, texts, self.loader.curriculum)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the epoch that the trainer is in."""
        assert self._train is not None, "setup() opens the artifacts"
        return self._loader(self._train, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Batches in a fixed order; none if there is nothing to validate on."""
        return [] if self._val is None else self._loader(self._val, shuffle=False)

    def answer_token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64 how often each token stands in the answers to train on.

        Raises:
            ArtifactError: the artifacts are streamed, and would have to be read twice.
        """
        assert self._train is not None, "setup() opens the artifacts"
        if isinstance(self._train, StreamedArtifacts):
            raise ArtifactError(
                "a draft vocabulary is chosen from the answers to train on, which takes local artifacts: copy the "
                "shards, or set drafter.draft_vocabulary=null"
            )
        return answer_token_counts(cast(Sequence[TeacherSample], self._train), vocab_size)

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """What the artifacts that were opened depend on, by what they are for; plain types."""
        return {use: asdict(artifacts.manifest.fingerprint) for use, artifacts in self._opened.items()}

    def folder_of(self, source: ConversationSource) -> Path:
        """Where the artifacts of ``source`` are kept."""
        if self.folder is not None and source is self.train_source:
            return self.folder
        return self.root / f"{self.checkpoint.name}-{self._fingerprint(source).digest()}"

    def _count(self) -> None:
        """Has the conversations to train on counted, where they are conversations."""
        sources = [source for source in (self.train_source, self.text_source) if source is not None]
        known = [len(source) for source in sources if isinstance(source, ConversationSource)]
        if self._require_enough is not None and len(known) == len(sources):
            self._require_enough(sum(known))

    def _tower(self) -> HFTarget:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if self._load_vision is not None:
            return self._load_vision(device)
        return load_vision(self.checkpoint, device=device, dtype=torch.float32)

    def _fingerprint(self, source: ConversationSource) -> Fingerprint:
        return fingerprint_checkpoint(self.checkpoint, self.export_config, source.digest())

    def _open(self, source: ConversationSource | str | Path) -> IndexedArtifacts | StreamedArtifacts:
        if isinstance(source, ConversationSource):
            folder = self.folder_of(source)
            artifacts = open_artifacts(folder, self.export_config.feature_layers, self.loader.checksums)
            artifacts.manifest.fingerprint.require(self._fingerprint(source), str(folder))
            return artifacts
        location = str(source)
        if is_remote(location):
            artifacts = StreamedArtifacts(
                location,
                batch_size=self.loader.batch_size,
                num_workers=self.loader.num_workers,
                shuffle_buffer=self.loader.shuffle_buffer if source is self.train_source else 0,
                seed=self.loader.seed,
                cache=self.root / "streamed",
                feature_layers=self.export_config.feature_layers,
                collate=self._collate,
                patience=Patience(self.loader.retries, self.loader.timeout),
            )
        else:
            artifacts = open_artifacts(location, self.export_config.feature_layers, self.loader.checksums)
        expected = fingerprint_checkpoint(self.checkpoint, self.export_config, data="")
        artifacts.manifest.fingerprint.require(expected, location, fields=_OF_THE_TARGET)
        if artifacts.manifest.fingerprint.visual == "recomputed":
            require_sight(self.checkpoint)
        return artifacts

    def _decodes(self) -> bool:
        """Whether pictures are decoded when batches are made."""
        return any(opened.manifest.fingerprint.visual == "recomputed" for opened in self._opened.values())

    def _loader(self, data: Dataset[TeacherSample] | StreamedArtifacts, shuffle: bool) -> DataLoader:
        pin = torch.cuda.is_available()
        if isinstance(data, StreamedArtifacts):
            return StreamLoader(
                data,
                epoch=lambda: epoch_under_way(self.trainer),
                batches_done=lambda: batches_done(self.trainer),
                finish=self._sight,
                pin_memory=pin,
            )
        threads = 0 if self._decodes() else self.loader.threads
        if threads and self.loader.num_workers:
            logger.info(
                "local shards are read by %d threads (data.loader.threads) and not by %d worker processes",
                threads, self.loader.num_workers,
            )  # fmt: skip
        return EpochLoader(
            data,
            sampler=epoch_sampler(data, self.trainer, self.loader, shuffle=shuffle),
            batches_done=lambda: batches_done(self.trainer),
            batch_size=self.loader.batch_size,
            num_workers=self.loader.num_workers,
            collate_fn=self._collate,
            finish=self._sight,
            identity=lambda: samples_digest(data),
            threads=threads,
            pin_memory=pin,
        )


def split_by_picture(pictures: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the samples to train on and to validate on; samples that share a picture stay together.

    ``pictures`` names the picture of each sample, or the sample itself if it has none.

    At least one sample is on the validation side where there are two pictures; of a single one all of it trains.
    """
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(pictures):
        groups.setdefault(name, []).append(number)
    order = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}-{name}".encode()).digest())
    wanted, val = max(1, round(fraction * len(pictures))), list[int]()
    for name in order[:-1]:
        if len(val) >= wanted:
            break
        val += groups[name]
    if not val:
        logger.warning(
            "all %d samples share a picture, so none is kept for validation; name some in val", len(pictures)
        )
    kept = set(val)
    return [n for n in range(len(pictures)) if n not in kept], sorted(val)
