"""The manifest: which samples lie where in which shard, and the fingerprint of what made them."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.files import write_text

MANIFEST = "manifest.json"
#: Raised whenever older files can no longer be read.
FORMAT = 1
#: What files that are damaged, or of somebody else, do to those who read them.
_DAMAGED = (KeyError, TypeError, AttributeError, ValueError, RecursionError)
_SHARD = re.compile(r"shard-[0-9]+-[0-9]+\.tar")


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in its shard, and its lengths.

    Attributes:
        meta: offset and size in bytes of its ``meta.json``.
        data: offset and size in bytes of its ``safetensors``.
        images: hashes of its images.
        xxh3: XXH3-64 of both members, one behind the other, as 16 hex digits; see :func:`content_hash`.
        crc: CRC-32 of them, in its place, in artifacts of older versions; those with neither go unchecked.
    """

    key: str
    tokens: int
    supervised: int
    visual: int
    meta: tuple[int, int]
    data: tuple[int, int]
    source: str = ""
    images: tuple[str, ...] = ()
    crc: int | None = None
    xxh3: str | None = None

    @staticmethod
    def from_json(values: dict[str, Any]) -> SampleEntry:
        """The entry of its JSON object.

        Raises:
            TypeError: a value is of another type.
        """
        entry = SampleEntry(**{**values, **{name: tuple(values[name]) for name in ("meta", "data", "images")}})
        whole = (entry.tokens, entry.supervised, entry.visual, *entry.meta, *entry.data)
        texts = (entry.key, entry.source, *entry.images, entry.xxh3 or "")
        sound = len(entry.meta) == len(entry.data) == 2 and all(type(n) is int and n >= 0 for n in whole)
        if not sound or not all(isinstance(text, str) for text in texts) or type(entry.crc) not in (int, type(None)):
            raise TypeError(f"no entry of a sample: {str(values)[:200]}")
        return entry


@dataclass(frozen=True)
class ShardEntry:
    """A whole shard: its file, size in bytes, hash and samples in the order of the file."""

    name: str
    bytes: int
    sha256: str
    samples: tuple[SampleEntry, ...]

    @staticmethod
    def from_json(values: dict[str, Any]) -> ShardEntry:
        """The entry of its JSON object.

        Raises:
            TypeError: a value is of another type, or the name is none that an export gives: it becomes part of paths,
                and of commands that read it.
        """
        entry = ShardEntry(**{**values, "samples": tuple(SampleEntry.from_json(s) for s in values["samples"])})
        sound = type(entry.bytes) is int and entry.bytes >= 0 and isinstance(entry.sha256, str)
        if not sound or not isinstance(entry.name, str) or not _SHARD.fullmatch(entry.name):
            raise TypeError(f"no entry of a shard: {entry.name!r} of {entry.bytes!r} bytes")
        if twice := _twice(sample.key for sample in entry.samples):
            raise TypeError(f"{entry.name} has the sample {twice!r} twice")
        return entry

    def write(self, folder: Path, fingerprint: Fingerprint) -> None:
        """Puts the index of this shard, whose samples have ``fingerprint``, beside it into ``folder``."""
        write_checked(self.index(folder), {"fingerprint": asdict(fingerprint), "shard": asdict(self)})

    def index(self, folder: Path) -> Path:
        """The file that says what is in the shard, until there is a manifest."""
        return (folder / self.name).with_suffix(".json")

    @staticmethod
    def read(path: Path) -> tuple[Fingerprint, ShardEntry]:
        """Fingerprint and entry of the shard whose index is the file ``path``.

        Raises:
            ArtifactError: it is missing, cut, damaged, or the index of another shard.
        """
        try:
            values = checked(path.read_bytes())
            fingerprint, entry = Fingerprint.from_json(values["fingerprint"]), ShardEntry.from_json(values["shard"])
            if entry.name != path.with_suffix(".tar").name:
                raise ValueError(f"it is that of {entry.name}")
        except OSError as error:
            raise ArtifactError(f"{path} is missing or cannot be read ({error.strerror or error})") from error
        except _DAMAGED as error:
            raise ArtifactError(f"{path} is damaged ({error})") from error
        return fingerprint, entry


@dataclass(frozen=True)
class Manifest:
    """All shards of a finished export.

    Attributes:
        skipped: reason by key, of conversations that gave no sample.
    """

    fingerprint: Fingerprint
    shards: tuple[ShardEntry, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Samples in all shards."""
        return sum(len(shard.samples) for shard in self.shards)

    def samples(self) -> Iterator[SampleEntry]:
        """The samples, shard by shard."""
        for shard in self.shards:
            yield from shard.samples

    def require_feature_layers(self, wanted: Sequence[int], where: str) -> None:
        """Refuses artifacts, found at ``where``, that lack outputs of the layers ``wanted``.

        Raises:
            ArtifactError: naming the layers wanted and those that are there.
        """
        held = self.fingerprint.feature_layers
        if not set(wanted) <= set(held):
            raise ArtifactError(
                f"the drafter reads the outputs of layers {list(wanted)} and the artifacts in {where} hold "
                f"{f'those of {list(held)}' if held else 'none'}; export with feature_layers={list(wanted)}"
            )

    def summary(self) -> str:
        """One line: samples, tokens, supervised positions, visual tokens, gigabytes, and what was skipped."""
        totals = [sum(getattr(s, name) for s in self.samples()) for name in ("tokens", "supervised", "visual")]
        size = sum(shard.bytes for shard in self.shards) / 1e9
        text = (
            f"{len(self):,} samples in {len(self.shards)} shards, {totals[0]:,} tokens, {totals[1]:,} supervised, "
            f"{totals[2]:,} visual, {size:.2f} GB"
        )
        reasons = Counter(reason.split(":")[0] for reason in self.skipped.values())
        return text + "".join(f"; skipped {count}: {reason}" for reason, count in reasons.items())

    def write(self, folder: Path) -> None:
        """Puts the manifest into ``folder``, whole or not at all."""
        shards = [asdict(shard) for shard in self.shards]
        values = {"format": FORMAT, "fingerprint": asdict(self.fingerprint), "skipped": self.skipped, "shards": shards}
        write_checked(folder / MANIFEST, values)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest in ``folder``.

        Raises:
            ArtifactError: if there is none, or it is not one of ours.
        """
        path = folder / MANIFEST
        if not path.is_file():
            whole = len(list(folder.glob("shard-*.tar"))) if folder.is_dir() else 0
            begun = f"; an export left {whole} whole shards there, run it again and it resumes" if whole else ""
            raise ArtifactError(f"no finished artifacts in {folder}: {MANIFEST} is missing{begun}")
        return Manifest.from_bytes(path.read_bytes(), str(path))

    @staticmethod
    def from_bytes(raw: bytes, where: str) -> Manifest:
        """The manifest of its JSON text, read from ``where``.

        Raises:
            ArtifactError: if it is cut, no manifest, or of another format version.
        """
        try:
            values = json.loads(raw)
            if values["format"] != FORMAT:
                raise ArtifactError(f"{where} has format {values['format']}, this version reads {FORMAT}; export again")
            values = _verified(values)
            shards = tuple(ShardEntry.from_json(shard) for shard in values["shards"])
            if twice := _twice(shard.name for shard in shards):
                raise ValueError(f"it lists {twice} twice")
            if twice := _twice(sample.key for shard in shards for sample in shard.samples):
                raise ValueError(f"it lists the sample {twice!r} twice")
            fingerprint = Fingerprint.from_json(values["fingerprint"])
            return Manifest(fingerprint, shards, reasons(values["skipped"]))
        except ArtifactError:
            raise
        except _DAMAGED as error:
            raise ArtifactError(
                f"{where} is damaged or no manifest of artifacts ({error}); delete it and export again, which keeps "
                "the samples of all whole shards"
            ) from error


def content_hash(meta: bytes | memoryview, data: bytes | memoryview) -> str:
    """XXH3-64 of a sample's two members, as 16 hex digits: as sure as a checksum, at the pace of memory."""
    digest = xxhash.xxh3_64(meta)
    digest.update(data)
    return digest.hexdigest()


def reasons(values: Any) -> dict[str, str]:
    """What was skipped and why, out of JSON.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(values, dict) or not all(isinstance(why, str) for why in values.values()):
        raise TypeError("skipped must hold a reason in words by key")
    return values


def checked(raw: bytes) -> dict[str, Any]:
    """The values of a JSON text that :func:`write_checked` has written; older versions wrote no checksum.

    Raises:
        ValueError: it is no JSON, or its CRC-32 is another.
        TypeError: it holds no named values.
        RecursionError: its brackets have no end.
    """
    return _verified(json.loads(raw))


def _verified(values: Any) -> dict[str, Any]:
    """``values`` without their CRC-32, once it is found to be theirs; the errors are those of :func:`checked`."""
    if not isinstance(values, dict):
        raise TypeError("it holds no named values")
    crc = values.pop("crc", None)
    if crc is not None and crc != (found := _crc(values)):
        raise ValueError(f"its CRC-32 is {found}, and it says {crc}")
    return values


def write_checked(path: Path, values: dict[str, Any]) -> None:
    """Writes ``values`` to ``path`` in one piece, with a CRC-32 over them."""
    write_json(path, {"crc": _crc(values), **values})


def _crc(values: dict[str, Any]) -> int:
    """CRC-32 of a file's content, however it is laid out."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _twice(names: Iterable[str]) -> str | None:
    """A name that comes twice; None if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes ``values`` to ``path`` in one piece."""
    write_text(path, json.dumps(values, separators=(",", ":")))
