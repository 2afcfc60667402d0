"""Jobs that read what was decoded before: ``traces=`` by our metrics, ``audit=`` two sets of answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from fovea.app import assemble, targets
from fovea.app.runs import record_settings
from fovea.app.typed import SettingError, build, convert
from fovea.decoding.selection import resolve
from fovea.evaluation import published_report
from fovea.evaluation.answers import Answer, AnswerSet, read_answers, read_comparisons
from fovea.evaluation.audit import AUDIT, Audit, Judge, audit
from fovea.evaluation.losslessness import Comparison, compare
from fovea.evaluation.prompts import user_turns
from fovea.evaluation.published import judge
from fovea.evaluation.recorded import trace_folders
from fovea.evaluation.table import plain_table
from fovea.targets.load import load_generation_config, load_spec

#: Differences that are printed; the report has all of them.
_MOST_LINES = 20


@dataclass(frozen=True)
class AuditConfig:
    """How two sets of answers are compared.

    Attributes:
        cap: tokens at which answers were cut, for both sets or for each; None goes by what is recorded.
        ties: ask the target about the first difference of tokens.
        partial: compare what both sets answer, whatever one of them lacks.
    """

    cap: int | tuple[int, ...] | None = None
    ties: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.cap, tuple) and len(self.cap) != 2:
            raise ValueError(f"cap is {list(self.cap)}; give one number of tokens, or one per set")
        if any(cap is not None and cap < 1 for cap in self.caps):
            raise ValueError(f"cap is {self.cap}; it must be at least 1")

    @property
    def caps(self) -> tuple[int | None, int | None]:
        """Of the first and of the second set."""
        return (self.cap[0], self.cap[1]) if isinstance(self.cap, tuple) else (self.cap, self.cap)


def reads_outputs(cfg: DictConfig) -> bool:
    """Whether the job reads finished answers and decodes nothing."""
    if cfg.traces is not None and cfg.audit is not None:
        raise SettingError("traces judges published traces and audit compares two sets of answers; give one of them")
    return cfg.traces is not None or cfg.audit is not None


def outputs_job(cfg: DictConfig) -> dict[str, float]:
    """Reads and judges what ``cfg.traces`` or ``cfg.audit`` names; returns the headline numbers.

    Raises:
        SettingError: a setting cannot be used.
        RecordError: a record cannot be.
        LosslessnessError: of an audit, after its report was written: an answer differs without an explanation.
        IncompleteError: likewise: a set lacks answers of the other.
    """
    config = build(AuditConfig, OmegaConf.to_container(cfg.auditing, resolve=True), "auditing")  # type: ignore[arg-type]
    folder = Path(cfg.paths.output_dir)
    if cfg.traces is None:
        return _audit(cfg, config, folder)
    source = Path(convert(cfg.traces, str, "traces")).expanduser()
    if config.caps[0] != config.caps[1]:
        raise SettingError(f"auditing.cap is {config.cap}; published traces have one cap, so give one number")
    judged = [judge(path, config.caps[0], cfg.speed.resamples) for path in trace_folders(source)]
    record_settings(folder, cfg)
    published_report.write(judged, folder)
    published_report.print_tables(judged)
    print(f"report in {folder / published_report.REPORT}.md")
    return published_report.numbers(judged)


def _audit(cfg: DictConfig, config: AuditConfig, folder: Path) -> dict[str, float]:
    names = [cfg.audit] if isinstance(cfg.audit, str) else convert(list(cfg.audit), list[str], "audit")
    if len(names) not in (1, 2):
        raise SettingError(f"audit names {len(names)} sets of answers; give two, or one evaluation: audit=[a,b]")
    judge_ties: Judge | None = None
    if len(names) == 1:
        comparisons = read_comparisons(names[0])
        if comparisons is None:
            raise SettingError(f"{names[0]} is no evaluation of ours, which holds two sets; give two: audit=[a,b]")
        first, second = (read_answers(f"{names[0]}@{side}") for side in ("autoregressive", "speculative"))
        judge_ties = _recorded(comparisons)
    else:
        first, second = map(read_answers, names)
    if config.ties:
        judge_ties = _target_judge(cfg, first)
    found = audit(first, second, caps=config.caps, judge=judge_ties, same_prompts=len(names) == 1)
    record_settings(folder, cfg)
    found.save(folder)
    print_audit(found, folder)
    found.require_explained()
    if not config.partial:
        found.require_whole()
    return {f"answers_{name}": float(count) for name, count in found.counts().items()}


def _recorded(comparisons: dict[str, Comparison]) -> Judge:
    """What the evaluation itself found when the target was at hand."""
    return lambda first, second: comparisons[first.key]


def _target_judge(cfg: DictConfig, reference: AnswerSet) -> Judge:
    """Asks the target of the settings; prompts are the benchmark's, later turns behind the answers of ``reference``.

    Raises:
        SettingError: the benchmark lacks a prompt, or an answer to it has no tokens.
    """
    job = assemble.start(cfg)
    conversations = {turn.key: (c, n) for c in job.prompts or () for n, turn in enumerate(user_turns(c))}
    for key, answer in reference.answers.items():
        if key not in conversations:
            raise SettingError(f"the benchmark has no prompt '{key}', which {reference.name} answers; choose its own")
        if answer.tokens is None:
            raise SettingError(f"auditing.ties needs tokens, and {reference.name} has only text")
    folder = assemble.find_target(job)
    selection = resolve(job.settings.selection, load_generation_config(folder), load_spec(folder))
    load = cache(targets.loader(folder, cfg.model.dtype, job.device, to_device=True))

    def asked(first: Answer, second: Answer) -> Comparison:
        conversation, number = conversations[first.key]
        turns = user_turns(conversation)
        earlier = [reference.answers[turn.key].tokens or () for turn in turns[:number]]
        target = load()
        encoded = target.encode(turns[number], earlier)
        cap = job.settings.speed.max_new_tokens
        answers = (first.tokens or (), second.tokens or ())
        return compare(target, encoded, *answers, max_new_tokens=cap, selection=selection)

    return asked


def print_audit(found: Audit, folder: Path) -> None:
    """The table of an audit, and its first differences."""
    console = Console()
    console.print(f"{found.second} beside {found.first}", markup=False, soft_wrap=True)
    console.print(plain_table(found.rows(), ""))
    for hint in found.hints:
        console.print(hint, markup=False)
    lines: Sequence[str] = found.lines()
    for line in lines[:_MOST_LINES]:
        console.print(line, markup=False)
    if len(lines) > _MOST_LINES:
        console.print(f"and {len(lines) - _MOST_LINES} more")
    print(f"report in {folder / AUDIT}.md")
