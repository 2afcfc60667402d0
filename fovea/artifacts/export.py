"""Writes down what a target teaches: ``python -m fovea.artifacts.export --help``, or :func:`export`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fovea.artifacts.background import Background
from fovea.artifacts.config import ExportConfig
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.lesson import Lesson
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.progress import ExportProgress
from fovea.artifacts.ranks import shared_by, sole_writer
from fovea.artifacts.teaching import ConversationTeacher, Taught
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.artifacts.writer_process import WriterProcess
from fovea.targets.base import Target
from fovea.targets.conversation import Conversation

logger = logging.getLogger(__name__)

#: Batches that may wait to be stored. More would only hold memory of the device: if storing is slower than teaching,
#: it sets the pace however many wait.
_WAITING_BATCHES = 2


def export(
    target: Target,
    conversations: Sequence[Conversation],
    folder: Path,
    config: ExportConfig,
    fingerprint: Fingerprint,
    *,
    progress: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> Manifest | None:
    """Runs ``target`` over ``conversations`` and stores one sample each in ``folder``; resumes what is there.

    Conversations with a broken picture, with a prompt that the target cannot read, longer than ``max_tokens``, or
    without a supervised token give no sample; each is reported and kept with its reason in the manifest.

    ``fingerprint`` is that of target, data and ``config``. This process takes every ``world_size``-th conversation,
    from ``rank`` on, and leaves out what any rank has in a whole shard; so an export may go on with another number of
    ranks than it began with. While the target is at work on a batch a process or a thread (``config.writer``) stores
    the ones before it. ``progress`` shows, on rank 0, how fast all ranks that share the folder are, and the time left.

    Returns:
        The manifest, or None while other ranks are not done.

    Raises:
        FingerprintMismatchError: if the folder holds samples made with another fingerprint.
        ArtifactError: for doubled keys, a rank that there is not, files that cannot be written, or if nothing gave a
            sample.
    """
    folder = Path(folder)
    require_some(conversations)
    keys = _refuse_doubled_keys(conversations)
    if not 0 <= rank < world_size:
        raise ArtifactError(f"there is no rank {rank} among {world_size}; ranks count from 0")
    with sole_writer(folder, rank) as sole, shared_by(folder, world_size) as shared:
        if (folder / MANIFEST).is_file():
            manifest = Manifest.read(folder)
            manifest.fingerprint.require(fingerprint, str(folder))
            return manifest
        teacher = ConversationTeacher(target, config)
        settings = {"dtype": config.dtype, "shard_bytes": config.shard_bytes, "rank": rank}
        writer: ArtifactWriter | WriterProcess
        if config.writes_apart(target.device):
            writer = WriterProcess(folder, fingerprint, **settings, locks=(sole, shared))
        else:
            writer = ArtifactWriter(folder, fingerprint, **settings)
        mine = range(rank, len(conversations), world_size)
        pending = [index for index in mine if conversations[index].key not in writer.done]
        if len(pending) < len(mine):
            logger.info("%s holds %d of %d samples; resuming", folder, len(mine) - len(pending), len(mine))
        done = len(mine) - len(pending)
        pace = ExportProgress(folder, rank, world_size, total=len(conversations), done=done, shown=progress)

        def store(taught: Taught) -> None:
            writer.store(Lesson.of(taught, config.visual))

        with writer, pace.shown(), Background(store, waiting=_WAITING_BATCHES * config.batch_size) as storing:
            remaining = iter(pending)
            while batch := [conversations[index] for index in islice(remaining, config.batch_size)]:
                for taught in teacher.teach(batch):
                    storing.put(taught)
                pace.advance(len(batch), writer.bytes)
        pace.end(writer.bytes)
        if missing := finish_rank(folder, fingerprint, teacher.skipped, rank, world_size, keys):
            logger.info("rank %d of %d is done; %d conversations are left to others", rank, world_size, missing)
        if not (folder / MANIFEST).is_file():
            return None
        manifest = Manifest.read(folder)
        logger.info("artifacts in %s: %s", folder, manifest.summary())
        return manifest


def require_some(conversations: Sequence[Conversation]) -> None:
    """Refuses a data set without conversations, by the name that it gives itself, before a target is loaded for it.

    Raises:
        ArtifactError: there is none.
    """
    if len(conversations) == 0:
        raise ArtifactError(f"there is no conversation in {conversations}; is a file empty, or a limit 0?")


def _refuse_doubled_keys(conversations: Sequence[Conversation]) -> set[str]:
    """Their keys."""
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.key in seen:
            raise ArtifactError(
                f"two conversations have the key '{conversation.key}'; keys must be unique in a data set"
            )
        seen.add(conversation.key)
    return seen


if __name__ == "__main__":
    from fovea.artifacts.command import main

    main()
