"""Writes teacher samples into webdataset shards; the shards on disk are the only state.

A shard grows under a hidden temporary name. When it is whole its index (``shard-*.json``) is written and then the
shard is renamed, so that a file called ``shard-*.tar`` beside its index is always complete, however the writer ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from webdataset.writer import TarWriter

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.keys import escape
from fovea.artifacts.lesson import Lesson
from fovea.artifacts.manifest import Manifest, SampleEntry, ShardEntry, content_hash, reasons, write_json
from fovea.artifacts.progress import forget_paces
from fovea.artifacts.ranks import exclusively
from fovea.artifacts.schema import META, TENSORS, SampleMeta, StoredDtype, encode_sample
from fovea.targets.teacher_batch import TeacherSample

#: Finds what is damaged.
CHECK = "python -m fovea.artifacts.check"
#: A tar archive ends with two empty blocks.
_END_OF_ARCHIVE = bytes(2 * tarfile.BLOCKSIZE)


def whole_shards(folder: Path, fingerprint: Fingerprint) -> list[ShardEntry]:
    """The complete shards in ``folder``, whichever rank wrote them.

    Raises:
        FingerprintMismatchError: if one of them was made with another fingerprint.
        ArtifactError: a shard is cut, or its index cannot be read; what to delete is named.
    """
    shards = []
    for path in sorted(folder.glob("shard-*.json")):
        shard = path.with_suffix(".tar")
        if not shard.is_file():
            continue
        try:
            made_with, entry = ShardEntry.read(path)
        except ArtifactError as error:
            raise ArtifactError(
                f"{error}; let {CHECK} {folder} --drop remove it and export again: only the samples of its shard are "
                "done once more"
            ) from error
        made_with.require(fingerprint, str(folder))
        if (size := shard.stat().st_size) != entry.bytes:
            raise ArtifactError(
                f"{shard} is cut or not ours: it has {size} bytes, its index says {entry.bytes} with "
                f"{len(entry.samples)} samples; let {CHECK} {folder} --drop remove it and export again: only its "
                "samples are done once more"
            )
        shards.append(entry)
    return shards


class ArtifactWriter:
    """Appends samples to shards of about ``shard_bytes``; a context manager.

    Left by an exception (Ctrl-C included) it still completes the current shard, with the samples that were written
    whole. Opening a folder again continues behind its complete shards and drops what a killed writer left.

    Attributes:
        done: keys of all samples in complete shards at the start.
        bytes: appended since then.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, dtype: StoredDtype, shard_bytes: int, rank: int = 0):
        """Args are those of the export; each rank numbers its own shards.

        Raises:
            FingerprintMismatchError: if the folder holds shards with another fingerprint.
        """
        self.folder, self.fingerprint, self.rank = folder, fingerprint, rank
        self._dtype: StoredDtype = dtype
        self._shard_bytes = shard_bytes
        folder.mkdir(parents=True, exist_ok=True)
        shards = whole_shards(folder, fingerprint)
        self.done = frozenset(sample.key for shard in shards for sample in shard.samples)
        mine = [shard.name for shard in shards if shard.name.startswith(f"shard-{rank:02d}-")]
        self._number = max((int(Path(name).stem.rpartition("-")[2]) + 1 for name in mine), default=0)
        for left in folder.glob(f".shard-{rank:02d}-*.partial"):
            left.unlink()
        self.bytes = 0
        self._file: BinaryIO | None = None
        self._written = set(self.done)

    def store(self, lesson: Lesson) -> None:
        """Appends what is to be stored of a conversation; raises as :meth:`write`."""
        self.write(lesson.sample, lesson.meta())

    def write(self, sample: TeacherSample, meta: SampleMeta) -> None:
        """Appends a sample.

        Raises:
            ArtifactError: for a key that was written before, a sample that cannot be stored, or a file that cannot be
                written.
        """
        if sample.key in self._written:
            raise ArtifactError(f"the key '{sample.key}' occurs twice; keys of conversations must be unique")
        content = encode_sample(sample, meta, self._dtype)
        fragment, members = _tar_fragment(escape(sample.key), content)
        with _writing_to(self.folder):
            if self._file is not None and self._size + len(fragment) > self._shard_bytes:
                self._finish_shard()
            if self._file is None:
                self._start_shard()
            assert self._file is not None
            self._file.write(fragment)
        self._hash.update(fragment)
        at = {name: (self._size + offset, size) for name, (offset, size) in members.items()}
        entry = SampleEntry(
            key=sample.key,
            tokens=sample.ids.shape[0],
            supervised=sample.mid.shape[0],
            visual=sample.visual.shape[0],
            meta=at[META],
            data=at[TENSORS],
            source=meta.source,
            images=meta.image_hashes,
            xxh3=content_hash(content[META], content[TENSORS]),
        )
        # Only now is the sample whole: what an interrupt leaves behind this size is cut off.
        self._size += len(fragment)
        self.bytes += len(fragment)
        self._samples.append(entry)
        self._written.add(sample.key)

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with _writing_to(self.folder):
                self._finish_shard()
        except ArtifactError:
            if error is None:  # otherwise the first one says more
                raise

    def _start_shard(self) -> None:
        self._name = f"shard-{self.rank:02d}-{self._number:05d}.tar"
        self._partial = self.folder / f".{self._name}.partial"
        self._size, self._hash, self._samples = 0, hashlib.sha256(), list[SampleEntry]()
        self._file = self._partial.open("wb")

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        # A process that ends here leaves nothing under a shard's name, whatever the disk had room for.
        with self._file as file:
            self._file = None
            file.truncate(self._size)
            file.seek(self._size)
            if self._samples:
                file.write(_END_OF_ARCHIVE)
            file.flush()
            os.fsync(file.fileno())
        if not self._samples:
            self._partial.unlink()
            return
        self._hash.update(_END_OF_ARCHIVE)
        size = self._size + len(_END_OF_ARCHIVE)
        shard = ShardEntry(self._name, size, self._hash.hexdigest(), tuple(self._samples))
        shard.write(self.folder, self.fingerprint)
        self._partial.rename(self.folder / self._name)
        self._number += 1


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            f"artifacts cannot be written to {folder} ({error.strerror or error}); make room there or mend it, and the "
            "same command resumes behind the last whole shard"
        ) from error


def _tar_fragment(name: str, members: dict[str, bytes]) -> tuple[memoryview, dict[str, tuple[int, int]]]:
    """A webdataset sample as a piece of a tar archive, and offset and size of each member's content in it."""
    buffer = io.BytesIO()
    writer = TarWriter(buffer, encoder=False, mtime=0)
    writer.write({"__key__": name, **members})
    size = writer.tarstream.offset
    writer.close()
    with tarfile.open(fileobj=io.BytesIO(buffer.getbuffer()[:size])) as archive:
        places = {info.name.partition(".")[2]: (info.offset_data, info.size) for info in archive}
    return buffer.getbuffer()[:size], places


def finish_rank(
    folder: Path,
    fingerprint: Fingerprint,
    skipped: dict[str, str],
    rank: int,
    world_size: int,
    keys: Collection[str] | None = None,
) -> int:
    """Records that ``rank`` of ``world_size`` is done, and writes the manifest if nothing is missing any more.

    That is when each of ``keys``, those of all conversations, is in a whole shard or was skipped, however many ranks
    have been at work on them; without ``keys`` it is when all ranks have recorded that they are done.

    Returns:
        How many keys, or ranks, are missing.

    Raises:
        ArtifactError: if all are done and not one sample was stored, or one was stored twice.
    """
    digest = fingerprint.digest()
    with exclusively(folder, ".lock-manifest"):
        write_json(_rank_file(folder, rank, world_size), {"skipped": skipped, "fingerprint": digest})
        records = {path: _read_record(path) for path in folder.glob("rank-*-of-*.json")}
        everything: dict[str, str] = {}
        for record in records.values():
            if record.get("fingerprint", digest) == digest:
                everything |= record["skipped"]
        shards = whole_shards(folder, fingerprint)
        holder: dict[str, str] = {}
        for name, key in ((shard.name, sample.key) for shard in shards for sample in shard.samples):
            if key in holder:
                raise ArtifactError(
                    f"sample '{key}' is in {holder[key]} and in {name} of {folder}; let {CHECK} {folder} --drop remove "
                    "one of the two, and the same command makes what is then missing again"
                )
            holder[key] = name
        if keys is None:
            missing = sum(_rank_file(folder, r, world_size) not in records for r in range(world_size))
        else:
            missing = sum(key not in holder and key not in everything for key in keys)
        if missing:
            return missing
        manifest = Manifest(
            fingerprint, tuple(shards), {key: why for key, why in everything.items() if key not in holder}
        )
        if len(manifest) == 0:
            examples = "; ".join(f"'{key}': {reason}" for key, reason in list(everything.items())[:3])
            raise ArtifactError(f"not one of {len(everything)} conversations gave a sample ({examples})")
        manifest.write(folder)
        for left in folder.glob(".shard-*.partial"):  # of ranks that were killed and did not come back
            left.unlink(missing_ok=True)
        forget_paces(folder)
    return 0


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        return {**record, "skipped": reasons(record["skipped"])}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def _rank_file(folder: Path, rank: int, world_size: int) -> Path:
    return folder / f"rank-{rank:02d}-of-{world_size:02d}.json"
