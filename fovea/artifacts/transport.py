"""Bringing shards here: from folders, servers and commands, again if that fails, with local copies.

A copy is kept under the shard's hash and name, appears only when it is whole and has that hash, and is made by one
process of a host while others wait for it. Where copies cannot be kept a warning says so, and shards are read from
their source in every epoch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, TypeVar, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from webdataset.gopen import gopen
from webdataset.utils import enforce_security  # pyright: ignore[reportAttributeAccessIssue]  (its stub lacks it)

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest, ShardEntry
from fovea.artifacts.ranks import exclusively

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_SERVERS = ("http://", "https://")
T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long a source is borne with.

    Attributes:
        retries: further attempts at what could not be read.
        timeout: seconds without a byte after which a server counts as silent; a command has to see to it itself.
        pause: seconds before the second attempt, and twice as many before each further one.
    """

    retries: int = 3
    timeout: float = 60.0
    pause: float = 1.0


def is_remote(location: str) -> bool:
    """True for a URL or a pipe, false for a local folder."""
    return "://" in location or location.startswith("pipe:")


def runs_command(location: str) -> bool:
    """Whether reading from ``location`` runs a command: a pipe, or a URL for which webdataset calls a program."""
    return is_remote(location) and not location.startswith(_SERVERS)


def address(location: str, name: str) -> str:
    """Where the file ``name`` is at ``location``: a path, a URL, or a command ``pipe:... {name} ...``."""
    return location.replace("{name}", name) if "{name}" in location else f"{location.rstrip('/')}/{name}"


def open_location(location: str, name: str, timeout: float = Patience.timeout) -> BinaryIO:
    """The file ``name`` at ``location``.

    As everywhere in webdataset, WDS_SECURE=1 in the environment forbids pipes.
    """
    if not is_remote(location):
        return (Path(location) / name).open("rb")
    if location.startswith("pipe:") and enforce_security:
        raise ArtifactError(f"WDS_SECURE=1 in the environment forbids commands ({location}); give a folder or URL")
    if location.startswith("pipe:") and "{name}" not in location:
        raise ArtifactError(f"'{location}' reads no particular file; write {{name}} where the name of a shard belongs")
    if location.startswith(_SERVERS):
        # Some servers answer nobody without a name.
        request = Request(address(location, name), headers={"User-Agent": "fovea"})
        return cast(BinaryIO, urlopen(request, timeout=timeout))
    return cast(BinaryIO, gopen(address(location, name)))


def read_manifest(location: str, patience: Patience | None = None) -> Manifest:
    """The manifest at ``location``; of a server that does not answer it is asked for again.

    Raises:
        ArtifactError: if it cannot be read there.
    """
    if not is_remote(location):
        return Manifest.read(Path(location))
    patience = patience or Patience()

    def read() -> Manifest:
        try:
            with open_location(location, MANIFEST, patience.timeout) as stream:
                return Manifest.from_bytes(stream.read(), f"{location} {MANIFEST}")
        except HTTPException as error:
            raise OSError(str(error)) from error

    def lasting(error: OSError) -> bool:
        """A server that knows nothing of it, or a command that failed."""
        return not location.startswith(_SERVERS) or (isinstance(error, HTTPError) and error.code < 500)

    try:
        return patiently(read, patience, f"{location} {MANIFEST}", lasting=lasting)
    except OSError as error:
        raise ArtifactError(f"no finished artifacts at {location}: {MANIFEST} cannot be read ({error})") from error


def patiently(
    attempt: Callable[[], T], patience: Patience, what: str, lasting: Callable[[OSError], bool] = lambda error: False
) -> T:
    """What ``attempt`` returns; it is made again after an OSError, unless it is ``lasting`` or the last one."""
    for number in range(patience.retries):
        try:
            return attempt()
        except OSError as error:
            if lasting(error):
                raise
            pause = patience.pause * 2**number
            logger.warning("%s could not be read (%s); once more in %.0f s", what, error, pause)
            time.sleep(pause)
    return attempt()


class _NotBroughtError(OSError):
    """A shard did not come, or not as it is."""


class _NotKeptError(Exception):
    """A local copy cannot be written; holds the error that says why."""


class ShardSource:
    """Opens the shards at ``location``.

    Args:
        cache: folder of local copies; None keeps none.
    """

    def __init__(self, location: str, patience: Patience, cache: Path | None = None) -> None:
        self.location, self.patience, self.cache = location, patience, cache

    @property
    def retries(self) -> int:
        """Further attempts at a shard; a local file does not change by being read again."""
        return self.patience.retries if is_remote(self.location) else 0

    def open(self, shard: ShardEntry) -> BinaryIO:
        """The shard, as a local copy if copies are kept.

        Raises:
            ArtifactError: it could not be copied.
            OSError: it cannot be opened.
        """
        copy = self._copy(shard)
        return open_location(self.location, shard.name, self.patience.timeout) if copy is None else copy.open("rb")

    def forget_damaged(self, shard: ShardEntry) -> Path | None:
        """Deletes the local copy if it is not what was copied, and says where it was; else None."""
        path = self._place(shard)
        try:
            if path is None or not path.is_file():
                return None
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256:
                    return None
            path.unlink(missing_ok=True)
        except OSError:  # whatever ails the folder, the copy is not what can be mended
            return None
        return path

    def failed(self, shard: ShardEntry, why: str) -> ArtifactError:
        """The error that says so, after the last attempt."""
        server = self.location.startswith(_SERVERS)
        remedy = (
            f"see that the server has it and answers within {self.patience.timeout:g} s (data.loader.timeout), or copy "
            "the artifacts to a local folder"
            if server
            else "see that the command finds it and ends with 0, or copy the artifacts to a local folder"
        )
        attempts = f"{self.retries + 1} attempts" if self.retries else "one attempt"
        return ArtifactError(
            f"shard {shard.name} could not be read in {attempts} from {address(self.location, shard.name)}: {why}; "
            f"{remedy}"
        )

    def _place(self, shard: ShardEntry) -> Path | None:
        return None if self.cache is None else self.cache / f"{shard.sha256[:16]}-{shard.name}"

    def _copy(self, shard: ShardEntry) -> Path | None:
        """The local copy, made now if there is none; None if none can be kept."""
        path = self._place(shard)
        if path is None:
            return None
        try:
            if _whole(path, shard):
                return path
            path.parent.mkdir(parents=True, exist_ok=True)
            with exclusively(path.parent, f".{path.name}.lock"):
                if not _whole(path, shard):
                    patiently(lambda: self._download(shard, path), self.patience, address(self.location, shard.name))
        except _NotKeptError as error:
            self._give_up_copies(error.args[0])
            return None
        except _NotBroughtError as error:
            raise self.failed(shard, str(error)) from error
        except OSError as error:  # all others are of the cache's folder
            self._give_up_copies(error)
            return None
        return path

    def _give_up_copies(self, error: OSError) -> None:
        logger.warning(
            "no copies of shards can be kept in %s (%s), so what is not there yet is read from %s in every epoch; make "
            "room there, or name another folder in data.root",
            self.cache, error.strerror or error, self.location,
        )  # fmt: skip
        self.cache = None

    def _download(self, shard: ShardEntry, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        digest, size = hashlib.sha256(), 0
        try:
            with _keeping(partial) as write:
                try:
                    with open_location(self.location, shard.name, self.patience.timeout) as stream:
                        while chunk := stream.read(_CHUNK):
                            write(chunk)
                            size += len(chunk)
                            digest.update(chunk)
                except _NotKeptError:
                    raise
                except (OSError, HTTPException) as error:
                    raise _NotBroughtError(str(error)) from error
            if digest.hexdigest() != shard.sha256:
                raise _NotBroughtError(
                    f"{size} bytes of {shard.bytes} arrived, or other content (sha256 differs from the manifest)"
                )
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _keeping(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Writes to ``path``; what goes wrong with that is no fault of the source."""
    try:
        file = path.open("wb")
    except OSError as error:
        raise _NotKeptError(error) from error

    def write(chunk: bytes) -> None:
        try:
            file.write(chunk)
        except OSError as error:
            raise _NotKeptError(error) from error

    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as error:
            raise _NotKeptError(error) from error


def _whole(path: Path, shard: ShardEntry) -> bool:
    return path.is_file() and path.stat().st_size == shard.bytes
