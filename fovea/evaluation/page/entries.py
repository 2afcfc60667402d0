"""The evaluations in some folders: of runs, of evaluations, of sweeps, and of benchmarks/methods.py."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fovea.evaluation.budget_results import BUDGET, BudgetResult
from fovea.evaluation.history import EVALUATIONS, TrainingHistory, reported_evaluation
from fovea.evaluation.json_lines import RecordError, read_object
from fovea.evaluation.results import ALL, EVALUATION, TRACES, SpeedResult
from fovea.evaluation.trajectory_files import load_trajectories

#: What an entry point leaves in the folder of a job: what was typed, and how it ended.
_OUTCOME = "outcome.json"
#: Folders of a job that hold no other job.
_NO_JOBS = frozenset(("checkpoints", "drafter", "drafter_best", "metrics", "plots", "wandb"))
#: Settings of a job that say where things lie, how it is called or how much was measured, and not what.
_ASIDE = re.compile(
    r"(ckpt|checkpoints|name|method|resume|init_from|plugins|tags)$|(hydra|paths|experiment|logger|speed|diagnostics|trainer)\b"
)


@dataclass(frozen=True)
class Entry:
    """One evaluation.

    Attributes:
        label: what the page calls it; no two entries have the same.
        job: folder of the run or evaluation that it belongs to.
        folder: the evaluation's own.
        result: its traces and settings.
        fields: what was typed for the job, by name.
        config: the job's settings, as nested plain types; empty if they were not kept.
        provenance: commit, versions and command line; empty if they were not kept.
        training_s: seconds of the training steps of its drafter, where that was noted.
        place: of ``folder`` below what is shown, so that no page tells where that lies.
        ended: that the job has failed, and why; empty otherwise. One under way looks as if it was interrupted.
    """

    label: str
    job: Path
    folder: Path
    result: SpeedResult
    fields: Mapping[str, str]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    training_s: float | None = None
    place: Path = Path()
    ended: str = ""

    @cached_property
    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures of every question family, and of all, last."""
        return self.result.figures()

    @property
    def pooled(self) -> dict[str, Any]:
        """The figures over all families."""
        return self.figures[ALL]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.result.settings.get("method", "speculative")

    @property
    def benchmark(self) -> str:
        """Name of the benchmark; empty where it was not recorded."""
        return str(self.result.settings.get("benchmark") or "")

    @property
    def target(self) -> str:
        """Name of the target's checkpoint; where it was not recorded, by the job's settings, else its architecture."""
        settings = self.result.settings
        return str(settings.get("target_name") or _checkpoint(self.config) or settings.get("target", ""))

    def pooled_over(self, keys: Collection[str]) -> dict[str, Any]:
        """The figures over the answers to ``keys`` alone, without intervals unless these are all."""
        prompts = [prompt for prompt in self.result.prompts if prompt.speculative.key in keys]
        if len(prompts) == len(self.result.prompts):
            return self.pooled
        return SpeedResult(prompts, {}, {**self.result.settings, "resamples": 0}).figures()[ALL]

    @cached_property
    def history(self) -> TrainingHistory:
        """What was logged while its drafter was trained, if this is the evaluation of a training run."""
        return TrainingHistory.read(self.job)

    @cached_property
    def budgets(self) -> BudgetResult | None:
        """Its visual budgets, if they were measured."""
        return BudgetResult.load(self.folder) if (self.folder / BUDGET).is_file() else None

    @cached_property
    def trajectories(self) -> list[dict[str, Any]]:
        """Its answers that were kept round by round, as :mod:`fovea.evaluation.trajectory_files` describes them."""
        return load_trajectories(self.folder)


def find_entries(folders: Sequence[Path]) -> tuple[list[Entry], dict[str, str]]:
    """The evaluations in ``folders`` at any depth, labelled; and jobs without one that is whole -> why.

    A job with a damaged file has none: what its other files say may belong to another measurement.

    Raises:
        FileNotFoundError: a folder is not there or holds no job, or no job has an evaluation that is whole.
    """
    entries: dict[Path, Entry] = {}
    without: dict[str, str] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is no folder, so it holds no speed evaluation; give folders of runs or sweeps"
            )
        found = 0
        for job, evaluation in _evaluations(folder):
            found += 1
            name = str(job.relative_to(folder)) if folder in job.parents else job.name
            try:
                if evaluation is not None:
                    entries.setdefault(evaluation.resolve(), _read(job, evaluation, folder))
                elif (ended := _failure(job)) is not None:
                    without[name] = ended
            except RecordError as error:
                without[name] = str(error).replace(str(folder), folder.resolve().name)
        if not found:
            raise FileNotFoundError(
                f"{folder} holds no speed evaluation; give the folder of a run with {EVALUATIONS}/ in it, or of a sweep"
            )
    if not entries:
        places = ", ".join(map(str, folders))
        why = "; ".join(f"{name}: {ended}" for name, ended in without.items()) or "its jobs were not to measure"
        raise FileNotFoundError(f"{places} holds no speed evaluation that can be shown ({why}); measure again")
    return labelled(list(entries.values())), without


def _evaluations(folder: Path) -> Iterator[tuple[Path, Path | None]]:
    """Jobs at or below ``folder``, and the evaluation that each reports; None if it has none."""
    if _is_whole(folder):
        yield folder.parent.parent if folder.parent.name == EVALUATIONS else folder, folder
        return
    try:
        reported = reported_evaluation(folder)
    except FileNotFoundError:
        reported = None
    if reported is not None and _is_whole(reported):
        yield folder, reported
        return
    if (folder / _OUTCOME).is_file():
        yield folder, None
        return
    children = [path for path in folder.iterdir() if path.is_dir() and path.name not in _NO_JOBS]
    for child in sorted(children, key=lambda path: (len(path.name) if path.name.isdigit() else 0, path.name)):
        if not child.name.startswith("."):
            yield from _evaluations(child)


def _is_whole(folder: Path) -> bool:
    """Whether a saved evaluation lies in it, and not one that was cut short while it was written."""
    return (folder / TRACES).is_file() and (folder / EVALUATION).is_file()


def _read(job: Path, evaluation: Path, shown: Path) -> Entry:
    """The evaluation, and everything that belongs to it.

    Raises:
        RecordError: a file of it is damaged.
    """
    result = SpeedResult.load(evaluation)
    config = _settings(job)
    # A sweep over methods takes its checkpoints from a folder of runs.
    trained = [job, *([Path(config["ckpt"])] if config.get("ckpt") else [])]
    if config.get("checkpoints"):
        trained.append(Path(config["checkpoints"]) / result.settings.get("method", ""))
    seconds = [_training_seconds(folder) for folder in trained]
    overrides = _json(job / _OUTCOME).get("overrides", [])
    fields = dict(override.split("=", 1) for override in overrides if "=" in override)
    provenance = _json(job / "provenance.json")
    place = Path(shown.resolve().name) / evaluation.relative_to(shown)
    known = next(filter(None, seconds), None)
    ended = (_failure(job) or "") if _json(job / _OUTCOME).get("status") == "failed" else ""
    entry = Entry("", job, evaluation, result, fields, config, provenance, known, place, ended)
    _require_whole(entry)
    return entry


def _require_whole(entry: Entry) -> None:
    """Raises:
    RecordError: a file of the evaluation is damaged, or holds what no figures can be made of.
    """
    for path, figures in ((TRACES, lambda: entry.figures), (BUDGET, lambda: entry.budgets and entry.budgets.figures())):
        try:
            figures()
        except RecordError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            words = f"{type(error).__name__}: {error}"
            raise RecordError(f"{entry.folder / path}: no figures can be made of it, {words}; measure again") from None
    # Read once, and kept.
    _ = entry.history, entry.trajectories


def _settings(job: Path) -> dict[str, Any]:
    path = job / "config.yaml"
    if not path.is_file():
        return {}
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise RecordError(f"{path}: no settings, {' '.join(str(error).split())}") from None
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}


def _checkpoint(config: Mapping[str, Any]) -> str:
    """Name of a job's target by its settings: that of the folder, else what the hub or the project calls it."""
    model = config.get("model")
    if not isinstance(model, Mapping):
        return ""
    return Path(str(model["path"])).name if model.get("path") else str(model.get("hub_id") or model.get("name") or "")


def _json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _training_seconds(run: Path) -> float | None:
    """Those of all stages of a campaign's drafter, else those that its run has counted."""
    counted = _json(run / _OUTCOME).get("metrics") or {}
    return _json(run / "training.json").get("seconds") or counted.get("train_s")


def _failure(job: Path) -> str | None:
    """How a job without an evaluation ended; None where it was not meant to have one."""
    outcome = _json(job / _OUTCOME)
    if outcome.get("status") == "completed":
        return None
    return ": ".join(filter(None, (outcome.get("status", "interrupted"), outcome.get("error"))))


def labelled(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, called as briefly as tells them apart.

    By name of method; where it is not enough, with target and benchmark, then the settings in which they differ, then
    the place.
    """
    labels = [entry.method for entry in entries]
    for more in (_measured_on, _typed, _job_name, _evaluation_name):
        crowds = [[e for e, other in zip(entries, labels, strict=True) if other == label] for label in labels]
        labels = [
            ", ".join(filter(None, (label, more(entry, crowd)))) if len(crowd) > 1 else label
            for entry, label, crowd in zip(entries, labels, crowds, strict=True)
        ]
    return [_called(entry, label) for entry, label in zip(entries, labels, strict=True)]


def _called(entry: Entry, label: str) -> Entry:
    """``entry`` under another name, with the figures that it has computed already."""
    other = copy(entry)
    object.__setattr__(other, "label", label)
    return other


def _measured_on(entry: Entry, crowd: Sequence[Entry]) -> str:
    names = [name for name in ("target", "benchmark") if len({getattr(one, name) for one in crowd}) > 1]
    return ", ".join(filter(None, (getattr(entry, name) for name in names)))


def _typed(entry: Entry, crowd: Sequence[Entry]) -> str:
    names = [name for name in dict.fromkeys(name for one in crowd for name in one.fields) if not _ASIDE.match(name)]
    differing = [name for name in names if len({one.fields.get(name) for one in crowd}) > 1]
    return " ".join(f"{name.rsplit('.', 1)[-1]}={entry.fields[name]}" for name in differing if name in entry.fields)


def _job_name(entry: Entry, crowd: Sequence[Entry]) -> str:
    names = [one.job.resolve().name for one in crowd]
    own = entry.job.resolve()
    distinct = len(set(names)) == len(names) and own.name != entry.method
    return own.name if distinct else f"{own.parent.name}/{own.name}"


def _evaluation_name(entry: Entry, crowd: Sequence[Entry]) -> str:
    if len({one.folder.name for one in crowd}) > 1:
        return entry.folder.resolve().name
    return entry.place.as_posix()
