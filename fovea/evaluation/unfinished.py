"""The answers of an evaluation under way, on disk one conversation after the other, so that a killed one goes on.

A rank appends to a file of its own, hidden in the evaluation's folder, whose first line says what the answers depend
on. Seconds stay those that were measured. The results of a finished evaluation (:mod:`fovea.evaluation.results`) are
written from all answers at its end, in one piece, and then these files go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PIL import Image
from torch import nn

from fovea.artifacts.export import hash_image
from fovea.artifacts.fingerprint import flat
from fovea.evaluation.results import PromptResult
from fovea.files import room_for, write_text
from fovea.targets.conversation import Conversation

logger = logging.getLogger(__name__)

_FILES = ".answers-*.jsonl"


class OtherSettingsError(ValueError):
    """Answers that were decoded with other settings than those that are to go on from them."""


@dataclass(frozen=True)
class Answered:
    """What became of a conversation: a result per user turn, or why it could not be read."""

    key: str
    prompts: list[PromptResult] = field(default_factory=list)
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types."""
        return {"key": self.key, "prompts": [p.to_json() for p in self.prompts], "failed": self.failed}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Answered:
        """What :meth:`to_json` wrote."""
        return cls(record["key"], [PromptResult.from_json(p) for p in record["prompts"]], record["failed"])


class UnfinishedAnswers:
    """Keeps a rank's answers while they are measured, and gives back those of an evaluation that was cut short.

    Args:
        folder: of the evaluation.
        identity: what answers and figures depend on, as plain types; see :func:`identity_of`.
        rank: of this process.
        world: processes that share the prompts.
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
        rank: int = 0,
        world: int = 1,
        earlier: Path | None = None,
        insist: bool = False,
    ) -> None:
        name = f".answers-{rank:02d}-of-{world:02d}.jsonl"
        self._path = folder / name
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._file: TextIO | None = None
        source = earlier or folder
        found, different = _read(source / name, self._identity)
        if different and insist:
            raise OtherSettingsError(
                f"the answers in {source} cannot be continued: {'; '.join(different)}. Resume with the settings of "
                "that evaluation, or measure anew without resume"
            )
        if different:
            logger.warning("what was answered in %s is measured anew: %s", source, "; ".join(different))
        elif found:
            logger.info("%d conversations were answered before; going on behind them", len(found))
        self.answered = {item.key: item for item in found}

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
    for path in folder.glob(_FILES):
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


def _read(path: Path, identity: Mapping[str, Any]) -> tuple[list[Answered], list[str]]:
    """The answers in ``path``, and in words how what they depend on differs from ``identity``.

    A line that a killed process was writing ends the answers, as does one that a stopped machine left unreadable.
    """
    if not path.is_file():
        return [], []
    records = _records(path)
    held = next(records, None)
    if held is None:
        return [], []
    was, now = flat(held), flat(dict(identity))
    names = sorted(was.keys() | now.keys())
    different = [f"{n} was {was.get(n)!r} and is {now.get(n)!r}" for n in names if was.get(n) != now.get(n)]
    if different:
        return [], different
    answered = []
    for record in records:
        try:
            answered.append(Answered.from_json(record))
        except (KeyError, TypeError, AttributeError, ValueError):
            break
    return answered, []


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
