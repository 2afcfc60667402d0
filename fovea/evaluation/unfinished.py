"""The answers of an evaluation under way, on disk one conversation after the other, so that a killed one goes on.

A rank appends to a file of its own, hidden in the evaluation's folder, whose first line says what the answers depend
on; each line carries a CRC-32. One that goes on reads the files of all ranks, so that it may go on with another number
of them. Seconds stay those that were measured. The results of a finished evaluation (:mod:`fovea.evaluation.results`)
are written from all answers at its end, in one piece, and then these files go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PIL import Image
from torch import nn

from fovea.artifacts.fingerprint import flat
from fovea.artifacts.lesson import hash_image
from fovea.evaluation.results import PromptResult
from fovea.files import room_for, write_text
from fovea.targets.conversation import Conversation

logger = logging.getLogger(__name__)

#: Names of the files in the folder of an evaluation.
JOURNALS = ".answers-*-of-*.jsonl"
#: What another number of processes changes in the conditions of a measurement, and in no answer.
_OF_RANKS = ("processes", "cpu_threads")
#: What a copy of the same weights may be called otherwise.
_NAMES = ("target_name", "target_revision")


class OtherSettingsError(ValueError):
    """Answers that were decoded with other settings than those that are to go on from them."""


@dataclass(frozen=True)
class Answered:
    """What became of a conversation: a result per user turn, or why it could not be read.

    Attributes:
        processes: how many shared the prompts when it was measured.
    """

    key: str
    prompts: list[PromptResult] = field(default_factory=list)
    failed: str | None = None
    processes: int = 1

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types."""
        prompts = [prompt.to_json() for prompt in self.prompts]
        return {"key": self.key, "prompts": prompts, "failed": self.failed, "processes": self.processes}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Answered:
        """What :meth:`to_json` wrote."""
        prompts = [PromptResult.from_json(prompt) for prompt in record["prompts"]]
        return cls(record["key"], prompts, record["failed"], int(record["processes"]))


class UnfinishedAnswers:
    """Keeps a rank's answers while they are measured, and gives back those of an evaluation that was cut short.

    Args:
        folder: of the evaluation.
        identity: what answers and figures depend on, as plain types; see :func:`identity_of`.
        keys: of the conversations that this rank answers; None takes all.
        rank: of this process.
        world: processes that share the prompts.
        redealt: take answers that another number of processes has measured.
        earlier: folder of the evaluation that this one continues; None looks into ``folder`` itself.
        insist: refuse answers of other settings, instead of measuring anew.

    Raises:
        OtherSettingsError: told to ``insist``; what differs is named.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        keys: Collection[str] | None = None,
        rank: int = 0,
        world: int = 1,
        redealt: bool = True,
        earlier: Path | None = None,
        insist: bool = False,
    ) -> None:
        self._path = folder / f".answers-{rank:02d}-of-{world:02d}.jsonl"
        self._identity: dict[str, Any] = json.loads(json.dumps({**identity, "processes": world}))
        self._file: TextIO | None = None
        source = earlier or folder
        found: dict[str, Answered] = {}
        different: dict[str, None] = {}
        fits = False
        for path in sorted(source.glob(JOURNALS)):
            answered, other = _read(path, self._identity, redealt)
            found |= {item.key: item for item in answered if keys is None or item.key in keys}
            different |= dict.fromkeys(other)
            fits |= not other
        if different and insist and not fits:
            raise OtherSettingsError(
                f"the answers in {source} cannot be continued: {'; '.join(different)}. Resume with the settings of "
                "that evaluation, or measure anew without resume"
            )
        if different:
            logger.warning("what was answered in %s is measured anew: %s", source, "; ".join(different))
        if others := {item.processes for item in found.values()} - {world}:
            counts = " and ".join(map(str, sorted(others)))
            logger.warning("of %d processes, going on behind answers that %s shared", world, counts)
        if found:
            logger.info("%d conversations were answered before; going on behind them", len(found))
        self.answered = found

    def __enter__(self) -> UnfinishedAnswers:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = (self._identity, *(item.to_json() for item in self.answered.values()))
        write_text(self._path, "".join(_line(record) for record in kept))
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, item: Answered) -> None:
        """Keeps ``item``, whatever becomes of this process.

        Raises:
            DiskFullError: there is no room for it.
        """
        assert self._file is not None, "open it with a with statement"
        with room_for(self._path):
            self._file.write(_line(item.to_json()))
            self._file.flush()


def discard_answers(folder: Path) -> None:
    """Removes the answers of an evaluation in ``folder`` whose results have been written."""
    for path in folder.glob(JOURNALS):
        path.unlink(missing_ok=True)


def identity_of(
    prompts: Sequence[Conversation], drafter: nn.Module | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the answers to ``prompts`` depend on, in plain types: the prompts, the drafter's weights, ``settings``."""
    digest = hashlib.sha256()
    for prompt in prompts:
        shown = [hash_image(image) if isinstance(image, Image.Image) else str(image) for image in prompt.images]
        digest.update(json.dumps([prompt.key, prompt.source, prompt.messages, shown]).encode())
    weights = 0
    for name, tensor in sorted(drafter.state_dict().items()) if drafter is not None else ():
        content = tensor.detach().cpu().float().contiguous().numpy()
        weights = zlib.crc32(content.reshape(-1).view("uint8"), zlib.crc32(name.encode(), weights))
    return {"prompts": digest.hexdigest()[:16], "drafter_weights": f"{weights:08x}", **settings}


def _read(path: Path, identity: Mapping[str, Any], redealt: bool) -> tuple[list[Answered], list[str]]:
    """The answers in ``path``, and in words how what they depend on differs from ``identity``."""
    records = list(_records(path))
    if not records or records[0][0] != 1:
        return [], []  # a killed process has not written the first line, or it is damaged and that was said
    was, now = flat(records[0][1]), flat(dict(identity))
    was |= {name: now.get(name) for name in _NAMES}
    if redealt and was.get("processes") != now["processes"]:
        was |= {name: now.get(name) for name in _OF_RANKS}
    names = sorted(was.keys() | now.keys())
    if different := [f"{n} was {was.get(n)!r} and is {now.get(n)!r}" for n in names if was.get(n) != now.get(n)]:
        return [], different
    answered = []
    for number, record in records[1:]:
        try:
            answered.append(Answered.from_json(record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            logger.warning("%s, line %d is of another version (%r): what it held is measured anew", path, number, error)
    return answered, []


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({"crc": _crc(record), **record}) + "\n"


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line; what a killed process was writing at the end counts for nothing.

    A damaged line is passed over with a warning: what it held is measured again.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            sound = isinstance(record, dict) and record.pop("crc", None) == _crc(record)
        except (ValueError, RecursionError):
            sound = False
        if sound:
            yield number, record
        else:
            what = "it held is" if number > 1 else "this file holds is"
            logger.warning(
                "%s, line %d is damaged, its CRC-32 does not match: what %s measured anew", path, number, what
            )
