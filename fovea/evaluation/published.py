"""What published traces say by our metrics, beside what was published about them.

Every method of a folder is paired with the baseline, turn by turn, and the pairs go through the same
:class:`fovea.evaluation.metrics.SpeedMetrics` as our own. Beside it stand the values of the folder's ``summary.csv``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fovea.evaluation.answers import Answer, AnswerSet
from fovea.evaluation.audit import Audit, audit
from fovea.evaluation.bootstrap import Pair, speed_intervals
from fovea.evaluation.json_lines import RecordError
from fovea.evaluation.metrics import SpeedMetrics
from fovea.evaluation.recorded import BASELINE, RECORDED_MEAN, RULES, RecordedMethod, RecordedTurn, read_methods
from fovea.evaluation.results import ALL
from fovea.text_files import text_lines

SUMMARY = "summary.csv"
#: Figures of the metrics that need nothing beyond what the layout records: no prefill, sizes of trees or memory.
SUPPORTED = (
    "samples",
    "rounds",
    "new_tokens",
    "tau",
    "accepted_drafts_per_round",
    "speedup",
    "mean_of_sample_speedups",
    "throughput_ratio",
    "mean_of_sample_throughput_ratios",
    "share_faster_than_ar",
    "ar_tokens_per_s",
    "spec_tokens_per_s",
)
#: Columns of MMSpec's summary and the figures that they are.
PUBLISHED = {
    "n_samples": "conversations",
    "n_turns": "samples",
    "total_new_tokens": "new_tokens",
    "total_wall_time": "wall_s",
    "total_draft_time": "draft_s",
    "total_target_time": "target_s",
    "MAT": "tau",
    "draft_accept_mean": "recorded_accepted",
    "speedup_paired": "mean_of_sample_throughput_ratios",
    "speedup_global": "throughput_ratio",
}
#: Name of a summary's pooled group.
_POOLED = "ALL"
#: Both sum floats of double precision, in different orders.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Beside:
    """A published value and ours; ``figure`` is what we call it."""

    group: str
    column: str
    figure: str
    published: float
    ours: float | None

    @property
    def equal(self) -> bool:
        """Whether they are the same but for the order in which floats were added."""
        return self.ours is not None and math.isclose(self.published, self.ours, rel_tol=_ROUNDING)


@dataclass(frozen=True)
class JudgedMethod:
    """A method beside the baseline.

    Attributes:
        rule: how its rounds were counted, of :data:`fovea.evaluation.recorded.RULES`.
        figures: by topic, and of all pooled, last.
        tau_by_rule: pooled tau under each rule, None where a rule needs what was not recorded.
        beside: what was published about it.
        lossless: its texts beside the baseline's.
        unpaired: keys that only it or only the baseline has; they are in no figure.
        unaccounted: turns whose recorded rounds do not add up to their tokens.
    """

    name: str
    file: str
    rule: str
    figures: dict[str, dict[str, Any]]
    tau_by_rule: dict[str, float | None]
    beside: list[Beside]
    lossless: Audit
    unpaired: list[str] = field(default_factory=list)
    unaccounted: int = 0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain types."""
        beside = [asdict(value) | {"equal": value.equal} for value in self.beside]
        return asdict(self) | {"beside": beside, "lossless": self.lossless.to_json()}


@dataclass(frozen=True)
class JudgedFolder:
    """The methods of a folder, and the rows of its summary that have no file."""

    name: str
    methods: list[JudgedMethod]
    skipped: list[str]


def judge(folder: Path, cap: int | None = None, resamples: int = 1000) -> JudgedFolder:
    """Judges every method in ``folder`` by the baseline that was decoded in the same way.

    Args:
        folder: of one target.
        cap: tokens at which answers were cut, for the comparison of their texts.
        resamples: of the intervals.

    Raises:
        FileNotFoundError: there is no baseline, or nothing beside it.
        RecordError: a record cannot be used, or a method shares no turn with the baseline.
    """
    methods = read_methods(folder)
    baselines = {method.suffix: method for method in methods if method.method == BASELINE}
    others = [method for method in methods if method.method != BASELINE]
    if not others:
        raise FileNotFoundError(
            f"{folder} holds no answers of a method; give a folder with <method>-temperature-0.jsonl"
        )
    single = len({method.suffix for method in others}) == 1
    published = _read_summary(folder / SUMMARY) if single else []
    judged = []
    for method in others:
        if method.suffix not in baselines:
            raise FileNotFoundError(
                f"{folder} holds no {BASELINE}{method.suffix}.jsonl to compare {method.path.name} with"
            )
        name = method.method if single else method.method + method.suffix
        judged.append(_judge(method, baselines[method.suffix], name, published, cap, resamples))
    with_file = {method.method for method in methods}
    skipped = sorted({row["method"] for row in published} - with_file)
    return JudgedFolder(folder.resolve().name, judged, skipped)


def _judge(
    method: RecordedMethod,
    baseline: RecordedMethod,
    name: str,
    published: Sequence[Mapping[str, str]],
    cap: int | None,
    resamples: int,
) -> JudgedMethod:
    own, theirs = ({turn.key: turn for turn in m.turns} for m in (method, baseline))
    turns = [turn for turn in method.turns if turn.key in theirs]
    if not turns:
        raise RecordError(
            f"{method.path} and {baseline.path} share no question_id; a method is paired with its baseline"
        )
    pairs = [(turn.speculative(name), theirs[turn.key].autoregressive()) for turn in turns]
    figures = _figures(turns, pairs, resamples)
    rules = sorted({turn.rule for turn in turns})
    beside = []
    for row in published:
        group = ALL if row["group"] == _POOLED else row["group"]
        if row["method"] == method.method and group in figures:
            beside += _compare(row, group, figures[group])
    return JudgedMethod(
        name,
        method.path.name,
        " and ".join(rules),
        figures,
        {rule: _tau(turns, lambda turn, rule=rule: turn.rounds(rule)) for rule in RULES},
        beside,
        audit(_texts(baseline), _texts(method), caps=(cap, cap)),
        [key for key in (*own, *theirs) if not (key in own and key in theirs)],
        sum(turn.by_round and not turn.accounted for turn in turns),
    )


def _figures(turns: Sequence[RecordedTurn], pairs: Sequence[Pair], resamples: int) -> dict[str, dict[str, Any]]:
    topics = sorted({turn.topic for turn in turns})
    deepest = max(r.tree_depth for speculative, _ in pairs for r in speculative.rounds)
    metrics = SpeedMetrics(topics, max(1, deepest), sync_on_compute=False)
    for pair in pairs:
        metrics.update(*pair)
    computed = metrics.compute()
    out = {}
    for group in (*topics, ALL):
        chosen = [place for place, turn in enumerate(turns) if group in (turn.topic, ALL)]
        numbers = computed["all"] if group == ALL else computed["per_source"][group]
        out[group] = {name: numbers[name] for name in SUPPORTED}
        out[group] |= _more([turns[place] for place in chosen], [pairs[place] for place in chosen], numbers)
        found = speed_intervals([pairs[place] for place in chosen], resamples)
        out[group]["intervals"] = {name: found[name] for name in found if name in SUPPORTED}
    return out


def _more(turns: Sequence[RecordedTurn], pairs: Sequence[Pair], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the layout's own: what is recorded beyond a trace, and the sums behind the shares."""
    traces = [speculative for speculative, _ in pairs]
    rounds = sum(len(trace.rounds) for trace in traces)
    accepted = sum(
        trace.notes[RECORDED_MEAN] * len(trace.rounds)
        if RECORDED_MEAN in trace.notes
        else sum(r.accepted for r in trace.rounds)
        for trace in traces
    )
    shares = {"draft": numbers["time_share"]["draft"], "target": numbers["time_share"]["verify"]}
    return {
        "conversations": len({turn.sample for turn in turns}),
        "recorded_accepted": accepted / rounds,
        "tau_without_first_token": _tau(turns, lambda turn: turn.rounds(turn.rule), first=0),
        "reach_rate": numbers["reach_rate"] if all(turn.by_round for turn in turns) else None,
        "time_share": shares | {"rest": 1 - sum(shares.values())},
        "wall_s": math.fsum(turn.wall_s for turn in turns),
        "draft_s": math.fsum(turn.draft_s for turn in turns),
        "target_s": math.fsum(turn.target_s for turn in turns),
    }


def _tau(turns: Sequence[RecordedTurn], rounds: Callable[[RecordedTurn], int | None], first: int = 1) -> float | None:
    """New tokens per round; the first token of every turn counts as ``first``."""
    counts = [count for turn in turns if (count := rounds(turn)) is not None]
    if len(counts) < len(turns) or not sum(counts):
        return None
    return sum(turn.new_tokens - 1 + first for turn in turns) / sum(counts)


def _texts(method: RecordedMethod) -> AnswerSet:
    answers = {turn.key: Answer(turn.key, turn.text, None, turn.new_tokens) for turn in method.turns}
    return AnswerSet(method.path.name, answers)


def _compare(row: Mapping[str, str], group: str, figures: Mapping[str, Any]) -> list[Beside]:
    values = {column: float(row[column]) for column in PUBLISHED if row.get(column)}
    return [
        Beside(group, column, PUBLISHED[column], value, figures[PUBLISHED[column]])
        for column, value in values.items()
        if not math.isnan(value)
    ]


def _read_summary(path: Path) -> list[dict[str, str]]:
    """Rows of a summary; empty if there is none.

    Raises:
        RecordError: it is not UTF-8, lacks the columns that name a row, or a value is no number.
    """
    if not path.is_file():
        return []
    rows = []
    reader = csv.DictReader(text for _, text in text_lines(path, RecordError))
    for row in reader:
        rows.append(row)
        number = reader.line_num
        for column in ("method", "group"):
            if not row.get(column):
                raise RecordError(
                    f"{path}, line {number}: '{column}' is missing; there are {', '.join(filter(None, row))}"
                )
        for column in PUBLISHED:
            try:
                float(row.get(column) or 0)
            except ValueError:
                raise RecordError(f"{path}, line {number}: '{column}' must be a number, got {row[column]!r}") from None
    return rows
