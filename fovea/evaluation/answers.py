"""Sets of answers from files, whoever wrote them, so that two of them can be compared.

Read are ``traces.jsonl`` of our evaluations, generation traces, MMSpec's answer files, and plain JSON Lines with
``key`` and ``text`` or ``tokens``, and if known ``finish`` (``eos`` or ``cap``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.evaluation.history import EVALUATIONS
from fovea.evaluation.json_lines import RecordError, checked, made, read_lines, required
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.recorded import sample_and_turns
from fovea.evaluation.report import reported_evaluation
from fovea.evaluation.results import TRACES
from fovea.targets.conversation import turn_key

#: Answers that each line of an evaluation's traces holds.
SIDES = ("autoregressive", "speculative", "transformers")
_TAKES = (
    "is no folder of a run or an evaluation of ours; give one, or a file: traces.jsonl of ours, one method's answers "
    "as MMSpec publishes them, or JSON Lines with key and text or tokens"
)
_MOST_FILES = 3


@dataclass(frozen=True)
class Answer:
    """One answer: its text, its token ids, or both.

    Attributes:
        key: of the prompt; a turn of several has its number behind a ``#``.
        count: number of tokens, where known.
        finish: ``eos`` or ``cap``; empty if not recorded.
    """

    key: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    count: int | None = None
    finish: str = ""


@dataclass(frozen=True)
class AnswerSet:
    """The answers of a file by key, in its order."""

    name: str
    answers: dict[str, Answer] = field(default_factory=dict)


def read_answers(source: str) -> AnswerSet:
    """The answers in ``source``: a file, a run's folder or an evaluation's.

    Of an evaluation those of the drafter are taken; ``<path>@autoregressive`` and ``<path>@transformers`` take others.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: a record holds no answer, or a key comes twice.
    """
    path, side = _split(source)
    answers: dict[str, Answer] = {}
    for where, record in read_lines(path):
        for answer in _answers(record, side, where):
            if answer.key in answers:
                raise RecordError(f"{where}: there is an answer to '{answer.key}' already; keys must differ")
            answers[answer.key] = answer
    if not answers:
        raise RecordError(f"{path} holds no answers{f' of {side}' if side else ''}")
    return AnswerSet(source, answers)


def read_comparisons(source: str) -> dict[str, Comparison] | None:
    """What an evaluation of ours found when the target was at hand, by key; None if ``source`` is something else.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is not JSON Lines, or a comparison is damaged.
    """
    records = list(read_lines(_split(source)[0]))
    if not all("comparison" in record for _, record in records):
        return None
    found = [
        made(lambda fields: Comparison(**fields), required(record, "comparison", dict, where), f"{where}, 'comparison'")
        for where, record in records
    ]
    return {comparison.key: comparison for comparison in found}


def _split(source: str) -> tuple[Path, str]:
    """File and side."""
    name, _, side = source.rpartition("@")
    if side not in SIDES:
        name, side = source, ""
    path = Path(name).expanduser()
    if (path / EVALUATIONS).is_dir():
        path = reported_evaluation(path)
    if path.is_dir():
        if not (path / TRACES).is_file():
            raise FileNotFoundError(f"{path} {_TAKES}{_files_in(path)}")
        path /= TRACES
    return path, side


def _files_in(folder: Path) -> str:
    """The first files of answers in ``folder``, to be named in an error."""
    found = sorted(str(path) for path in folder.rglob("*.jsonl"))
    more = ", ..." if len(found) > _MOST_FILES else ""
    return f"; there are {', '.join(found[:_MOST_FILES])}{more}" if found else ""


def _answers(record: dict[str, Any], side: str, where: str) -> list[Answer]:
    if "speculative" in record:
        trace = record.get(side or "speculative")
        return [] if trace is None else [_plain(checked(trace, dict, f"{where}: '{side}'"), where)]
    if side:
        raise RecordError(f"{where}: only an evaluation's {TRACES} holds answers of several loops; leave @{side} out")
    if "choices" in record:
        sample, texts = sample_and_turns(record, where)
        counts = record["choices"][0].get("new_tokens") or [None] * len(texts)
        if len(counts) != len(texts):
            raise RecordError(f"{where}, choices[0]: 'new_tokens' has {len(counts)} entries for {len(texts)} turns")
        keys = [turn_key(sample, number, len(texts)) for number in range(1, len(texts) + 1)]
        return [Answer(key, text, None, count) for key, text, count in zip(keys, texts, counts, strict=True)]
    return [_plain(record, where)]


def _plain(record: dict[str, Any], where: str) -> Answer:
    """An answer of a generation trace, or of a record with text or tokens."""
    key = str(required(record, "key", object, where))
    text = None if record.get("text") is None else required(record, "text", str, where)
    tokens = None
    # A trace from elsewhere counts tokens that it does not hold.
    if record.get("tokens") is not None and record.get("counted") is None:
        ids = required(record, "tokens", list, where)
        tokens = tuple(checked(token, int, f"{where}: 'tokens[{n}]'") for n, token in enumerate(ids))
    if text is None and tokens is None:
        raise RecordError(f"{where}: the answer to '{key}' has neither 'text' nor 'tokens'")
    count = len(tokens) if tokens is not None else record.get("counted")
    return Answer(key, text, tokens, count, str(record.get("finish") or ""))
