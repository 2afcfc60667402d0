"""Whether two sets of answers are the same, answer by answer, and if not, whether something explains it.

``exact``: the same tokens, or the same text. ``cut``: one ends at a cap and is the beginning of the other. ``tie``:
they part where the target itself has two tokens that are as good as equal (:mod:`fovea.evaluation.losslessness`); only
a target can say so. Anything else is ``unexplained``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fovea.evaluation.answers import Answer, AnswerSet
from fovea.evaluation.json_lines import RecordError
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.results import LosslessnessError
from fovea.evaluation.table import markdown_table
from fovea.files import write_text
from fovea.targets.conversation import conversation_of

AUDIT = "audit"

Outcome = Literal["exact", "cut", "tie", "unexplained"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "cut", "tie", "unexplained")
MEANINGS = {
    "exact": "the same tokens, or the same text where there are no tokens",
    "cut": "one answer ends at a cap and is the beginning of the other",
    "tie": "they part at a near-tie of the target's own logits",
    "unexplained": "they differ, and nothing of this explains it",
}

#: Asks a target about the first difference of two answers with tokens.
Judge = Callable[[Answer, Answer], Comparison]


class IncompleteError(RuntimeError):
    """Two sets do not answer the same prompts."""


@dataclass(frozen=True)
class Verdict:
    """On two answers to one prompt.

    Attributes:
        position: tokens, or characters of text, before the first difference; None if exact.
        detail: what is known about the difference.
    """

    key: str
    outcome: Outcome
    position: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Audit:
    """Two sets compared.

    Attributes:
        first, second: their names; the first is the reference.
        missing: keys that only the first has.
        extra: keys that only the second has.
        hints: what may explain differences that are counted as unexplained.
    """

    first: str
    second: str
    verdicts: list[Verdict]
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Answers per outcome."""
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def sample_counts(self) -> dict[str, int]:
        """Samples per outcome: that of a sample is the worst of its turns'."""
        worst: dict[str, int] = {}
        for verdict in self.verdicts:
            sample = conversation_of(verdict.key)
            worst[sample] = max(worst.get(sample, 0), OUTCOMES.index(verdict.outcome))
        found = Counter(worst.values())
        return {outcome: found[place] for place, outcome in enumerate(OUTCOMES)}

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types; of the verdicts those that are not exact."""
        different = [asdict(verdict) for verdict in self.verdicts if verdict.outcome != "exact"]
        return asdict(self) | {
            "answers": self.counts(),
            "samples": self.sample_counts(),
            "definitions": MEANINGS,
            "verdicts": different,
        }

    def rows(self) -> list[list[str]]:
        """Heading, answers and samples per outcome, as text."""
        body = [["answers", self.counts()], ["samples", self.sample_counts()]]
        return [
            ["", "compared", *OUTCOMES],
            *([str(name), str(sum(own.values())), *map(str, own.values())] for name, own in body),  # type: ignore[union-attr]
        ]

    def lines(self) -> list[str]:
        """Sentences about keys without a partner, and about every difference."""
        out = []
        for keys, there, not_there in ((self.missing, self.first, self.second), (self.extra, self.second, self.first)):
            if keys:
                out.append(f"{len(keys)} only in {there}, not in {not_there}: {', '.join(keys)}")
        for verdict in self.verdicts:
            if verdict.outcome != "exact":
                out.append(f"'{verdict.key}': {verdict.outcome}, {verdict.detail}")
        return out

    def save(self, folder: Path) -> None:
        """Writes ``audit.json`` and ``audit.md`` into ``folder``."""
        write_text(folder / f"{AUDIT}.json", json.dumps(self.to_json(), indent=2) + "\n")
        parts = [
            f"# {self.second} beside {self.first}",
            markdown_table(self.rows()),
            "\n".join(f"- **{name}**: {meaning}." for name, meaning in MEANINGS.items()),
            "A sample counts as the worst of its turns.",
            "\n".join(f"- {hint}." for hint in self.hints),
            "\n".join(f"- {line}" for line in self.lines()),
        ]
        write_text(folder / f"{AUDIT}.md", "\n\n".join(p for p in parts if p) + "\n")

    def require_whole(self) -> None:
        """Raises:
        IncompleteError: one of the sets lacks answers of the other.
        """
        if not (self.missing or self.extra):
            return
        lacks = [
            f"{name} lacks {len(keys)}"
            for name, keys in ((self.second, self.missing), (self.first, self.extra))
            if keys
        ]
        key = (self.missing or self.extra)[0]
        raise IncompleteError(
            f"{len(self.verdicts)} answers could be compared; {' and '.join(lacks)}, such as '{key}': complete the "
            "sets, or compare what both have with auditing.partial=true"
        )

    def require_explained(self) -> None:
        """Raises:
        LosslessnessError: an answer differs without an explanation.
        """
        wrong = [verdict for verdict in self.verdicts if verdict.outcome == "unexplained"]
        if wrong:
            raise LosslessnessError(
                f"{len(wrong)} of {len(self.verdicts)} answers differ without an explanation, first "
                f"'{wrong[0].key}': {wrong[0].detail}"
            )


def audit(
    first: AnswerSet,
    second: AnswerSet,
    *,
    caps: tuple[int | None, int | None] = (None, None),
    judge: Judge | None = None,
    same_prompts: bool = False,
) -> Audit:
    """Compares two sets.

    Args:
        first: the reference.
        second: what is compared with it.
        caps: tokens at which the answers of each were cut. Without one, only an answer whose record says that it
            finished at the cap counts as cut.
        judge: asks the target about a difference of tokens.
        same_prompts: both answered later turns behind the same earlier answers, even where theirs differ.

    Raises:
        RecordError: no key is in both, or two answers cannot be compared.
    """
    shared = [key for key in first.answers if key in second.answers]
    if not shared:
        raise RecordError(
            f"{first.name} and {second.name} share no key; the first ones are {_first_keys(first, second)}"
        )
    verdicts: list[Verdict] = []
    parted: set[str] = set()
    for key in shared:
        a, b = first.answers[key], second.answers[key]
        behind = not same_prompts and conversation_of(key) in parted
        verdict = _verdict(a, b, caps, None if behind else judge)
        if verdict.outcome != "exact":
            parted.add(conversation_of(key))
            if behind:
                verdict = Verdict(key, verdict.outcome, verdict.position, f"{verdict.detail}; an earlier turn differs")
        verdicts.append(verdict)
    unexplained = any(verdict.outcome == "unexplained" for verdict in verdicts)
    likely = [_likely_cap(own) for own, cap in zip((first, second), caps, strict=True) if cap is None and unexplained]
    return Audit(
        first.name,
        second.name,
        verdicts,
        [key for key in first.answers if key not in second.answers],
        [key for key in second.answers if key not in first.answers],
        list(filter(None, likely)),
    )


def _likely_cap(own: AnswerSet) -> str:
    """A sentence about several answers that all have the most tokens, and do not say how they ended; empty without."""
    counts = [one.count for one in own.answers.values() if one.count is not None and not one.finish]
    longest = max(counts, default=0)
    if not longest or (several := counts.count(longest)) < 2:
        return ""
    return (
        f"{several} answers of {own.name} have exactly {longest} tokens, the most of all, so they were probably cut at "
        f"that cap: auditing.cap={longest} counts as cut what ends there and is the beginning of the other answer"
    )


def _verdict(a: Answer, b: Answer, caps: tuple[int | None, int | None], judge: Judge | None) -> Verdict:
    if a.tokens is not None and b.tokens is not None:
        one, other, unit = a.tokens, b.tokens, "token"
    elif a.text is not None and b.text is not None:
        one, other, unit = a.text, b.text, "character"
    else:
        raise RecordError(f"of the answers to '{a.key}' one has only text and the other only tokens; give both alike")
    if one == other:
        return Verdict(a.key, "exact")
    # A cap may fall within a character of several tokens, which is then shown as a replacement.
    whole = [end.rstrip("\ufffd") if isinstance(end, str) else end for end in (one, other)]
    position = _common(*whole)
    shorter = min((0, 1), key=lambda side: len(whole[side]))
    detail = f"the first difference is {unit} {position}: {_shown(one, position)} and {_shown(other, position)}"
    if position == len(whole[shorter]):
        short = (a, b)[shorter]
        detail = f"the {('first', 'second')[shorter]} ends behind {position} {unit}s and the other one goes on"
        cap = caps[shorter]
        at_given_cap = not short.finish and cap is not None and short.count is not None and short.count >= cap
        if short.finish == "cap" or at_given_cap:
            return Verdict(a.key, "cut", position, f"{detail}: {short.count} tokens, a cap")
        if len(whole[0]) == len(whole[1]):
            detail = f"they differ in how they end behind {position} {unit}s"
    if judge is not None and unit == "token":
        comparison = judge(a, b)
        outcome: Outcome = "tie" if comparison.outcome == "tie" else "unexplained"
        return Verdict(a.key, outcome, position, str(comparison).partition(": ")[2])
    return Verdict(a.key, "unexplained", position, detail)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both share."""
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)


def _shown(answer: str | tuple[int, ...], position: int) -> str:
    if isinstance(answer, tuple):
        return str(answer[position]) if position < len(answer) else "the end"
    return repr(answer[position : position + 20]) if position < len(answer) else "the end"


def _first_keys(*sets: AnswerSet) -> str:
    return " and ".join(f"'{next(iter(own.answers))}'" for own in sets)
