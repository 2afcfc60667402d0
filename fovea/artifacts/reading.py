"""The indexed door: any sample of local shards by number, its tensors mapped from the tar without a copy."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import Manifest, SampleEntry, ShardEntry, content_hash
from fovea.artifacts.schema import SampleMeta, decode_sample
from fovea.targets.teacher_batch import TeacherSample

Checksums = Literal["always", "once"]
CHECKSUMS: tuple[str, ...] = get_args(Checksums)


class IndexedArtifacts(Dataset[TeacherSample]):
    """Samples by number, in the order of their keys; shards are mapped when first touched.

    Keys order them the same however many ranks have exported them, and when some were exported again.

    bf16 and fp32 states are views of a private mapping: writing to them changes neither the file nor other processes.
    Outputs of ``feature_layers`` are read with them. With ``checksums`` "once", bytes are compared with their checksum
    when this process reads them first, and not again.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, feature_layers: Sequence[int] = (), checksums: Checksums = "always"
    ):
        self.folder, self.manifest, self.feature_layers = folder, manifest, tuple(feature_layers)
        self._once, self._compared = checksums == "once", set[int]()
        placed = [(entry, shard) for shard in manifest.shards for entry in shard.samples]
        placed.sort(key=lambda pair: pair[0].key)
        self.entries: list[SampleEntry] = [entry for entry, _ in placed]
        self._shard_of: list[ShardEntry] = [shard for _, shard in placed]
        self._maps: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> TeacherSample:
        return self._read(index)[0]

    def meta(self, index: int) -> SampleMeta:
        """Source, image sizes and image hashes of a sample."""
        return self._read(index)[1]

    def verify(self) -> None:
        """Reads every byte and compares the shards' hashes.

        Raises:
            ArtifactError: naming a shard whose content is not what was written.
        """
        for shard in self.manifest.shards:
            if (problem := shard_problem(self.folder, shard)) is not None:
                raise ArtifactError(problem)

    def _read(self, index: int) -> tuple[TeacherSample, SampleMeta]:
        entry, shard = self.entries[index], self._shard_of[index]
        compare = not (self._once and index in self._compared)
        read = read_sample(self._map(shard), entry, str(self.folder / shard.name), self.feature_layers, compare)
        self._compared.add(index)
        return read

    def _map(self, shard: ShardEntry) -> Tensor:
        """[bytes] uint8 over the whole shard."""
        if shard.name not in self._maps:
            self._maps[shard.name] = _mapped(self.folder, shard)
        return self._maps[shard.name]

    def __getstate__(self) -> dict[str, Any]:
        """Without the mappings: a loader's worker process makes its own."""
        return self.__dict__ | {"_maps": {}}


def _mapped(folder: Path, shard: ShardEntry) -> Tensor:
    """[bytes] uint8 over a whole shard."""
    # Unlike mmap.mmap this keeps no file descriptor, so a set may have more shards than a process may open.
    storage = torch.UntypedStorage.from_file(str(folder / shard.name), shared=False, nbytes=shard.bytes)
    return torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, storage))


def read_sample(
    content: Tensor, entry: SampleEntry, path: str, feature_layers: Sequence[int] = (), compare: bool = True
) -> tuple[TeacherSample, SampleMeta]:
    """The sample of ``entry`` in the ``content`` of the shard at ``path``; ``compare`` its bytes with their checksum.

    Raises:
        ArtifactError: there is none, another one, or one that is damaged.
    """
    where = f"{path} at byte {entry.meta[0]}"
    meta, data = (content[offset : offset + size] for offset, size in (entry.meta, entry.data))
    try:
        sample, about = decode_sample(meta.numpy().tobytes(), data, feature_layers)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from error
    check_entry(sample, entry, where)
    if compare:
        check_content(meta.numpy().data, data.numpy().data, entry, where)
    return sample, about


def shard_problem(folder: Path, shard: ShardEntry) -> str | None:
    """What is wrong with a ``shard`` in ``folder``, every byte of which is read; None if nothing is.

    Each sample is compared with its entry too: a shard may be sound and what is said of it not.
    """
    path = folder / shard.name
    if not path.is_file():
        return f"{path} is missing; the manifest has {len(shard.samples)} samples in it"
    if (size := path.stat().st_size) != shard.bytes:
        return f"{path} is cut or not ours: it has {size} bytes, the manifest says {shard.bytes}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != shard.sha256:
        return f"{path} is damaged: its sha256 is {found}, the manifest has {shard.sha256}"
    content = _mapped(folder, shard)
    try:
        for entry in shard.samples:
            read_sample(content, entry, str(path))
    except ArtifactError as error:
        return str(error)
    return None


def open_artifacts(
    folder: Path | str, feature_layers: Sequence[int] = (), checksums: Checksums = "always"
) -> IndexedArtifacts:
    """The samples of a finished export in a local folder, with outputs of ``feature_layers`` if any are wanted.

    Raises:
        ArtifactError: if the manifest is missing, damaged or empty, a shard is missing, cut or of another size, a
            shard lies there that the manifest does not know, or the layers were not exported.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if not len(manifest):
        raise ArtifactError(f"the artifacts in {folder} hold no sample; export again")
    manifest.require_feature_layers(feature_layers, str(folder))
    for shard in manifest.shards:
        path = folder / shard.name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing; the manifest has {len(shard.samples)} samples in it")
        if (size := path.stat().st_size) != shard.bytes:
            raise ArtifactError(
                f"{path} is cut or not ours: it has {size} bytes, the manifest says {shard.bytes} "
                f"with {len(shard.samples)} samples; delete the folder and export again, or copy the shard again"
            )
    known = {shard.name for shard in manifest.shards}
    if strangers := sorted(path.name for path in folder.glob("*.tar") if path.name not in known):
        raise ArtifactError(f"{folder} holds {len(strangers)} shards that its manifest does not list: {strangers[0]}")
    return IndexedArtifacts(folder, manifest, feature_layers, checksums)


def check_content(meta: bytes | memoryview, data: bytes | memoryview, entry: SampleEntry, where: str) -> None:
    """Refuses a sample whose bytes are not those that were written; artifacts of older versions cannot be checked.

    Raises:
        ArtifactError: naming the sample, and both checksums.
    """
    if entry.xxh3 is not None:
        kind, found, wanted = "XXH3-64", content_hash(meta, data), entry.xxh3
    elif entry.crc is not None:
        kind, found, wanted = "CRC-32", f"{zlib.crc32(data, zlib.crc32(meta)):08x}", f"{entry.crc:08x}"
    else:
        return
    if found != wanted:
        raise ArtifactError(
            f"{where}: sample '{entry.key}' is damaged: its {kind} is {found}, the manifest has {wanted}; copy the "
            "shard again, or let python -m fovea.artifacts.check --drop find what is to be exported again"
        )


def check_entry(sample: TeacherSample, entry: SampleEntry, where: str) -> None:
    """Refuses a sample that is not the one that the manifest has at this place.

    Raises:
        ArtifactError: naming both keys, or the key and the lengths.
    """
    if sample.key != entry.key:
        raise ArtifactError(f"{where}: found sample '{sample.key}' where the manifest has '{entry.key}'")
    found = (sample.ids.shape[0], sample.mid.shape[0], sample.visual.shape[0])
    if found != (entry.tokens, entry.supervised, entry.visual):
        raise ArtifactError(
            f"{where}: sample '{sample.key}' has {found[0]} tokens, {found[1]} supervised, {found[2]} visual; "
            f"the manifest has {entry.tokens}, {entry.supervised}, {entry.visual}"
        )
