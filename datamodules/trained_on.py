"""What a drafter was trained on, so that nobody measures it on the same unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from datamodules.conversation_source import ConversationSource, SourceError, content_hash
from datamodules.mixture.files import MANIFESTS
from datamodules.mixture.official import official_ids
from datamodules.mixture.prints import Prints
from datamodules.mixture.recipe import TRAIN
from fovea.artifacts.lesson import hash_image
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.transport import is_remote
from fovea.targets.conversation import Conversation, ImageSource, conversation_of
from fovea.targets.images import BrokenImageError
from fovea.text_files import json_lines

logger = logging.getLogger(__name__)


class TrainedOn:
    """Samples and pictures that a manifest lists: one of a mixture's training, or that of artifacts.

    Args:
        place: a mixture's folder or its file of conversations, or a folder of artifacts.

    Raises:
        SourceError: there is no manifest, or it is damaged.
        ArtifactError: the same of artifacts.
    """

    def __init__(self, place: Path | str) -> None:
        path = manifest_of(Path(place))
        if path is None:
            raise SourceError(
                f"{place} is neither a training mixture nor a folder of artifacts: it has no manifest; give what "
                "python -m datamodules.mixture wrote, or what was exported of it"
            )
        self.manifest = path
        self._hash: Callable[[ImageSource], str] = hash_image
        if path.name == MANIFEST:
            samples = list(Manifest.read(path.parent).samples())
            self._names = {conversation_of(sample.key) for sample in samples}
            self._images = {image for sample in samples for image in sample.images}
            return
        prints = Prints()
        self._hash = lambda image: prints(image).pixels
        self._names, self._images = set[str](), set[str]()
        for line, entry in json_lines(path, SourceError):
            try:
                self._names.update([entry["key"], *entry["ids"]])
                self._images.update(entry["images"])
            except (KeyError, TypeError) as error:
                raise SourceError(f"{path}, line {line}: no line of a mixture's manifest; build it again") from error

    def has(self, item: Conversation) -> bool:
        """Whether ``item``, or a picture of it, was trained on; a broken picture was not."""
        if not self._names.isdisjoint([item.key, *official_ids(item)]):
            return True
        try:
            return any(self._hash(image) in self._images for image in item.images)
        except BrokenImageError:
            return False


class NotTrainedOn(ConversationSource):
    """Conversations of ``source`` that are not in ``trained``; the others are counted."""

    def __init__(self, source: ConversationSource, trained: TrainedOn) -> None:
        self.source, self.trained = source, trained

    def require_pictures(self) -> None:
        """Refuses what the source refuses, which knows the places."""
        self.source.require_pictures()
        len(self)

    def _read(self) -> list[Conversation]:
        kept = [item for item in self.source if not self.trained.has(item)]
        counts = self.source.counts()
        seen = counts.pop("kept") - len(kept)
        self._left_out = {why: count for why, count in counts.items() if why != "read"} | {"trained on": seen}
        if not kept:
            raise SourceError(f"{self.source}: all {seen} prompts were trained on, as {self.trained.manifest} says")
        logger.info("%s: %d of %d prompts were trained on, and are left out", self.source, seen, len(self.source))
        return kept

    def digest(self) -> str:
        """Changes with the source and the manifest."""
        return content_hash(self.source.digest(), self.trained.manifest.read_bytes())

    def __str__(self) -> str:
        return f"{self.source} without what {self.trained.manifest} lists"


@rank_zero_only
def _warn(message: str, *values: object) -> None:
    logger.warning(message, *values)


def manifest_of(place: Path) -> Path | None:
    """The manifest of a mixture's folder, of a file of conversations in one, or of artifacts; None if there is none."""
    mixture = (
        place / MANIFESTS / f"{TRAIN}.jsonl" if place.is_dir() else place.parent / MANIFESTS / f"{place.stem}.jsonl"
    )
    return next((path for path in (mixture, place / MANIFEST) if path.is_file()), None)


def place_of(train: Any) -> str | None:
    """Where the training conversations or artifacts lie that the setting ``data.train`` names; None if not on disk."""
    place = train.get("path") if isinstance(train, Mapping) else train
    if not isinstance(place, str) or is_remote(place):
        return None
    return str(Path(place).expanduser().absolute())


def tell_of_trained(prompts: Sequence[Conversation], place: str, of: str) -> int:
    """How many of ``prompts``, those ``of`` a benchmark, were trained on as the manifest at ``place`` says.

    The first process warns of them. 0 if there is no manifest.
    """
    if manifest_of(Path(place)) is None:
        return 0
    try:
        trained = TrainedOn(place)
    except (OSError, ValueError) as error:
        _warn("nobody can tell whether prompts of %s were trained on: %s", of, error)
        return 0
    seen = [item.key for item in prompts if trained.has(item)]
    if seen:
        _warn(
            "%d of the %d prompts of %s, the first '%s', or their pictures were trained on, as %s says; what is "
            "measured on them says nothing about others: leave them out with benchmark.exclude=%s",
            *(len(seen), len(prompts), of, seen[0], trained.manifest, place),
        )
    return len(seen)
