"""Answers that others have measured, in the layout in which the MMSpec benchmark publishes them, as our traces.

A file holds one method's answers, one sample per line: ``question_id``, ``topic``, and in ``choices[0]`` a list each of
texts (``turns``), loop counts (``idxs``), ``new_tokens``, ``wall_time``, ``draft_time``, ``target_time`` and
``acceptance_length``, with an entry per turn. Token ids are not published, and the metrics need none: a trace counts
them (``GenerationTrace.counted``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.decoding.trace import GenerationTrace, Round
from fovea.evaluation.json_lines import RecordError, checked, read_lines, required
from fovea.targets.conversation import turn_key

#: The method that the others are compared with.
BASELINE = "baseline"
#: Ways to count the rounds of a turn.
ENTRIES, IDXS, IDXS_AND_LAST = "entries", "idxs", "idxs + 1"
RULES = {
    ENTRIES: "a round per entry of acceptance_length, where that is a list with the accepted drafts of each round",
    IDXS: "as many rounds as idxs says, the index of the loop when it ended: it counts from 0, so one pass is left out",
    IDXS_AND_LAST: "one more than idxs: every pass of the loop is a round",
}
#: Name of a trace's note: what acceptance_length says where it is one number.
RECORDED_MEAN = "recorded_mean_accepted"

_NAME = re.compile(r"(?P<method>.+?)(?P<suffix>-temperature-[\d.]+)?\.jsonl")


@dataclass(frozen=True)
class RecordedTurn:
    """A turn as it was recorded.

    Attributes:
        sample: ``question_id`` of its record.
        key: the same, with the turn's number behind a ``#`` if there are several.
        text: the answer.
        new_tokens: tokens of the answer.
        wall_s, draft_s, target_s: seconds, all in all, of drafting and of the target.
        idxs: index of the loop when it ended; None if not recorded.
        accepted: drafts accepted in each round, or one number for the turn, or None of a baseline.
    """

    sample: str
    key: str
    topic: str
    text: str
    new_tokens: int
    wall_s: float
    draft_s: float
    target_s: float
    idxs: int | None
    accepted: list[int] | float | None
    where: str = field(compare=False)

    @property
    def by_round(self) -> bool:
        """Whether every round was recorded."""
        return isinstance(self.accepted, list)

    @property
    def rule(self) -> str:
        """The rule by which MMSpec's own scripts count its rounds."""
        return ENTRIES if self.by_round else IDXS

    def rounds(self, rule: str) -> int | None:
        """Number of rounds by ``rule``; None where it was not recorded."""
        if rule == ENTRIES:
            return len(self.accepted) if isinstance(self.accepted, list) else None
        return None if self.idxs is None else self.idxs + (rule == IDXS_AND_LAST)

    def autoregressive(self) -> GenerationTrace:
        """The turn as a trace without rounds."""
        return GenerationTrace(
            self.key, self.topic, "autoregressive", 0, 0, total_s=self.wall_s, counted=self.new_tokens
        )

    def speculative(self, method: str) -> GenerationTrace:
        """The turn as a trace whose rounds commit all its tokens.

        How many tokens a round committed is known where every round was recorded and their drafts, and a token more
        each, are the answer; else the tokens are spread evenly, with a draft less each. So are the seconds, of which
        there is one sum per turn. What is pooled does not depend on it. Sizes of trees and the prefill are unknown, 0.

        Raises:
            RecordError: no round was recorded for its tokens.
        """
        count = self.rounds(self.rule)
        if not count:
            name = "acceptance_length" if self.by_round else "idxs"
            raise RecordError(f"{self.where}: '{name}' of '{self.key}' counts no round for {self.new_tokens} tokens")
        committed = [self.new_tokens // count + (place < self.new_tokens % count) for place in range(count)]
        accepted = [max(0, tokens - 1) for tokens in committed]
        depths = [0] * count
        if isinstance(self.accepted, list):
            accepted = depths = self.accepted  # the tree was at least so deep
            if self.accounted:
                committed = [drafts + 1 for drafts in accepted]
        draft_s, verify_s = self.draft_s / count, self.target_s / count
        trace = self.autoregressive()
        trace.method = method
        trace.rounds = [
            Round(0, depth, drafts, tokens, draft_s, verify_s, draft_s + verify_s)
            for depth, drafts, tokens in zip(depths, accepted, committed, strict=True)
        ]
        if isinstance(self.accepted, float):
            trace.notes[RECORDED_MEAN] = self.accepted
        return trace

    @property
    def accounted(self) -> bool:
        """Whether the recorded rounds, a token more than their drafts each, are the whole answer."""
        return isinstance(self.accepted, list) and sum(self.accepted) + len(self.accepted) == self.new_tokens


@dataclass(frozen=True)
class RecordedMethod:
    """The file of one method: its name, the end of the file's name that says how it was decoded, and its turns."""

    path: Path
    method: str
    suffix: str
    turns: list[RecordedTurn]


def trace_folders(folder: Path) -> list[Path]:
    """``folder`` if answer files lie in it, else those of its folders that hold some.

    Raises:
        FileNotFoundError: there are none.
    """
    found = [path for path in (folder, *sorted(folder.glob("*/"))) if any(path.glob("*.jsonl"))]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no answer files; give a folder with <method>-temperature-0.jsonl in it"
        )
    return found[:1] if found[0] == folder else found


def read_methods(folder: Path) -> list[RecordedMethod]:
    """Every method of a folder, in the order of their names.

    Raises:
        RecordError: a record lacks a field, or holds something else in it.
    """
    methods = []
    for path in sorted(folder.glob("*.jsonl")):
        found = _NAME.fullmatch(path.name)
        assert found is not None
        name = found["method"]
        methods.append(RecordedMethod(path, name, found["suffix"] or "", list(read_turns(path, name != BASELINE))))
    return methods


def read_turns(path: Path, speculative: bool) -> Iterator[RecordedTurn]:
    """The turns of all samples in a file; those of a baseline have no accepted drafts.

    Raises:
        RecordError: the file is empty, a record lacks a field, holds something else in it, or a sample comes twice.
    """
    seen: dict[str, str] = {}
    for where, record in read_lines(path):
        sample, turns = sample_and_turns(record, where)
        if sample in seen:
            raise RecordError(f"{where}: question_id '{sample}' stands in {seen[sample].rpartition(', ')[2]} already")
        seen[sample] = where
        topic = required(record, "topic", str, where)
        for number, text in enumerate(turns):
            choice, place = record["choices"][0], f"choices[0], turn {number + 1}"
            yield RecordedTurn(
                sample,
                turn_key(sample, number + 1, len(turns)),
                topic,
                text,
                _number(choice, "new_tokens", number, int, where),
                _seconds(choice, "wall_time", number, where),
                _number(choice, "draft_time", number, float, where),
                _number(choice, "target_time", number, float, where),
                _number(choice, "idxs", number, int, where) if "idxs" in choice else None,
                _accepted(choice, number, where) if speculative else None,
                f"{where}, {place}",
            )
    if not seen:
        raise RecordError(f"{path} is empty; give a file with a sample per line, or take it out of the folder")


def sample_and_turns(record: dict[str, Any], where: str) -> tuple[str, list[str]]:
    """``question_id`` of a record and the texts of its turns.

    Raises:
        RecordError: one is missing, or something else.
    """
    sample = str(required(record, "question_id", object, where))
    choices = required(record, "choices", list, where)
    if not choices:
        raise RecordError(f"{where}: 'choices' is empty")
    turns = required(checked(choices[0], dict, f"{where}: 'choices[0]'"), "turns", list, f"{where}, choices[0]")
    return sample, [checked(text, str, f"{where}, choices[0]: 'turns[{n}]'") for n, text in enumerate(turns)]


def _entry(choice: dict[str, Any], name: str, number: int, where: str) -> Any:
    entries = required(choice, name, list, f"{where}, choices[0]")
    if number >= len(entries):
        raise RecordError(f"{where}, choices[0]: '{name}' has {len(entries)} entries for {len(choice['turns'])} turns")
    return entries[number]


def _number(choice: dict[str, Any], name: str, number: int, kind: type, where: str) -> Any:
    value = checked(_entry(choice, name, number, where), kind, f"{where}, choices[0]: '{name}[{number}]'")
    if not 0 <= value < float("inf"):
        raise RecordError(f"{where}, choices[0]: '{name}[{number}]' is {value}; it must not be negative or infinite")
    return value


def _seconds(choice: dict[str, Any], name: str, number: int, where: str) -> float:
    value = _number(choice, name, number, float, where)
    if value == 0:
        raise RecordError(f"{where}, choices[0]: '{name}[{number}]' is 0; no answer takes no time")
    return value


def _accepted(choice: dict[str, Any], number: int, where: str) -> list[int] | float:
    value, what = _entry(choice, "acceptance_length", number, where), f"'acceptance_length[{number}]'"
    if isinstance(value, list):
        return [_drafts(drafts, f"{where}, choices[0]: {what}[{n}]") for n, drafts in enumerate(value)]
    return _number(choice, "acceptance_length", number, float, where)


def _drafts(value: Any, what: str) -> int:
    """Drafts that a round accepted."""
    if (drafts := checked(value, int, what)) < 0:
        raise RecordError(f"{what} is {drafts}; it must not be negative")
    return drafts
