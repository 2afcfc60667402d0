"""Runs the jobs of a campaign one after another, trains what is missing, and goes on where a killed call stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fovea.campaign.jobs import Job, JobError, read_record, trained_seconds
from fovea.campaign.keys import MEASURING_CODE, TRAINING_CODE, code_digest, settings_digest
from fovea.campaign.pace import Pace, minutes
from fovea.campaign.plan import Measurement, Stage, Training, trainings_of

#: Seconds in which a drafter was trained, where the page looks for it.
TRAINING_FILE = "training.json"
#: One page over everything comes at the end.
_NO_PAGE = "page=off"
#: Seconds around the prompts of a measurement, and conversations of the embedded default.
_LOADING, _PROMPTS = 14.0, 96


@dataclass(frozen=True)
class Options:
    """How a campaign is run.

    Attributes:
        out: a folder per stage goes here, and one per measurement into it.
        checkpoints: folder of the trained drafters.
        overrides: of every training and every measurement.
        epochs: of each drafter, shared by the stages of its training; None takes the target's recipe.
        prompts: most conversations of a measurement; None leaves it to the stages.
        keyed: names of checkpoints end in the digest of their settings, so that several settings share a folder;
            otherwise a drafter of other settings replaces the one of its name.
        retrain: train anew what was trained by other code.
        shown: let every run talk on the console.
    """

    out: Path
    checkpoints: Path
    overrides: tuple[str, ...] = ()
    epochs: int | None = None
    prompts: int | None = None
    keyed: bool = True
    retrain: bool = False
    shown: bool = False


@dataclass
class Report:
    """What a call did.

    Attributes:
        trained, measured: folders of jobs that were run.
        kept: folders of jobs that had been finished before.
        older: names of drafters that other code has trained.
        failed: name of each training or measurement that failed -> why.
    """

    trained: list[Path] = field(default_factory=list)
    measured: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    older: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Campaign:
    """The jobs of some stages, in their order: a stage's drafters, then its measurements."""

    def __init__(self, stages: Sequence[Stage], options: Options) -> None:
        self.stages = stages
        self.options = options
        self.report = Report()
        self._trained: dict[Training, Path | None] = {}
        self._pace = Pace()

    def train(self) -> Report:
        """Trains the drafters that are missing, but for runs that measure themselves, and measures nothing."""
        trainings = [training for training in trainings_of(self.stages) if not training.measured]
        self._expect(trainings)
        print(self._to_do(), flush=True)
        for training in trainings:
            self.drafter(training)
        return self.report

    def run(self) -> Report:
        """Does what is not done yet; a job that fails does not keep the others from running."""
        self._expect(trainings_of(self.stages))
        for stage in self.stages:
            for measurement in stage.measurements:
                if self._is_due(self.job_of(stage, measurement)):
                    self._pace.add("measure", [self._seconds(stage, measurement)])
        print(self._to_do(), flush=True)
        for stage in self.stages:
            print(f"\n{stage.name}: {stage.about}", flush=True)
            for training in stage.runs:
                self.drafter(training)
            for measurement in stage.measurements:
                self.measure(stage, measurement)
        return self.report

    def folder_of(self, training: Training) -> Path:
        """Where the drafter of ``training`` lies, whether it is trained or not."""
        return self.jobs_of(training)[-1].folder

    def jobs_of(self, training: Training) -> list[Job]:
        """The runs of train.py that make a drafter; the last one's folder is its checkpoint."""
        jobs: list[Job] = []
        for number, experiment in enumerate(training.experiments):
            own = [f"experiment={experiment}", f"name={training.name}", _NO_PAGE, *self._logger]
            own += [*training.overrides] if training.measured else ["speed_eval=off", *training.overrides]
            if self.options.epochs is not None:
                own.append(f"model.recipe.epochs={self._epochs(training, number)}")
            if training.measured and (most := self.options.prompts) is not None:
                own += [f"speed.prompts={most}", f"speed.prompts_per_epoch={most}"]
            own += self.options.overrides
            before = [jobs[-1]] if jobs else []
            digest = settings_digest("train", own, *(job.settings for job in before))
            name = f"{training.name}-{digest}" if self.options.keyed else training.name
            last = number == len(training.experiments) - 1
            folder = self.options.checkpoints / (name if last else f".{name}-stage{number + 1}")
            own += [f"init_from={job.folder}" for job in before]
            jobs.append(Job("train.py", tuple(own), folder, digest, code_digest(TRAINING_CODE)))
        return jobs

    def job_of(self, stage: Stage, measurement: Measurement) -> Job:
        """The run of evaluate.py that makes ``measurement``."""
        prompts = self._prompts(stage)
        own = [*measurement.overrides, f"name={measurement.name}", _NO_PAGE, *self._logger]
        own += [f"speed.prompts={prompts}"] if prompts is not None else []
        own += self.options.overrides
        made_from = []
        if measurement.training is not None:
            trained = self.jobs_of(measurement.training)[-1]
            own.append(f"ckpt={trained.folder}")
            # Measured of this drafter, not of one that was trained anew since.
            record = read_record(trained.folder)
            made_from = [trained.settings, record.code if record is not None else trained.code]
        digest = settings_digest("evaluate", own, *made_from)
        folder = self.options.out / stage.name / measurement.name
        return Job("evaluate.py", tuple(own), folder, digest, code_digest(MEASURING_CODE))

    def drafter(self, training: Training) -> Path | None:
        """Trains the drafter unless it is there; None if that fails, which is reported once."""
        if training not in self._trained:
            self._trained[training] = self._train(training)
        return self._trained[training]

    def measure(self, stage: Stage, measurement: Measurement) -> None:
        """Makes a measurement unless it is there, and trains its drafter before."""
        name = f"{stage.name}/{measurement.name}"
        if measurement.training is not None and self.drafter(measurement.training) is None:
            self.report.failed[name] = f"its drafter, {measurement.training.name}, could not be trained"
            return
        job = self.job_of(stage, measurement)
        if not self._is_due(job):
            self.report.kept.append(job.folder)
        elif self._run(name, job, "measure", self._seconds(stage, measurement)):
            self.report.measured.append(job.folder)

    @property
    def _logger(self) -> tuple[str, ...]:
        """The logger of every run, unless one was asked for."""
        return () if asks_for_logger(self.options.overrides) else ("logger=csv",)

    def _expect(self, trainings: Sequence[Training]) -> None:
        for training in trainings:
            jobs = self.jobs_of(training)
            self._pace.add("train", [training.seconds / len(jobs) for job in jobs if self._is_due(job)])

    def _to_do(self) -> str:
        return f"{self._pace.left} runs to do, {minutes(self._pace.remaining())}"

    def _train(self, training: Training) -> Path | None:
        jobs, due = self.jobs_of(training), False
        for job in jobs:
            due = due or self._is_due(job)  # a later stage starts from the weights of the earlier one
            if not due:
                self.report.kept.append(job.folder)
                if job.state() == "other code":
                    self.report.older.append(training.name)
                continue
            if not self._run(f"train {training.name}", job, "train", training.seconds / len(jobs)):
                return None
            self.report.trained.append(job.folder)
        if due:
            content = {"seconds": trained_seconds([job.folder for job in jobs]), "stages": list(training.experiments)}
            (jobs[-1].folder / TRAINING_FILE).write_text(json.dumps(content), encoding="utf-8")
        return jobs[-1].folder

    def _run(self, name: str, job: Job, kind: str, expected: float) -> bool:
        state = job.state()
        print(f"[{self._pace.place()}] {name}" + (f" ({state} before)" if state.startswith("other") else ""))
        print(f"    {job.command}", flush=True)
        start = time.perf_counter()
        try:
            record = job.run(shown=self.options.shown)
        except JobError as error:
            self.report.failed[name] = str(error)
            print(f"    failed: {error}", flush=True)
            return False
        finally:
            self._pace.done(kind, expected, time.perf_counter() - start)
        told = ", ".join(f"{key} {record.metrics[key]:.2f}" for key in ("tau", "speedup") if key in record.metrics)
        words = [f"{record.seconds:.0f} s", *filter(None, [told]), minutes(self._pace.remaining())]
        print(f"    {'; '.join(words)}", flush=True)
        return True

    def _is_due(self, job: Job) -> bool:
        """A drafter of other code is kept unless it is to be trained anew; a measurement of other code is not."""
        keeps = job.script == "train.py" and not self.options.retrain
        return job.state() not in (("finished", "other code") if keeps else ("finished",))

    def _seconds(self, stage: Stage, measurement: Measurement) -> float:
        return measuring_seconds(measurement, self._prompts(stage))

    def _prompts(self, stage: Stage) -> int | None:
        return min((n for n in (stage.prompts, self.options.prompts) if n is not None), default=None)

    def _epochs(self, training: Training, number: int) -> int:
        """Epochs of a stage; what cannot be shared evenly goes to the last one."""
        assert self.options.epochs is not None
        stages = len(training.experiments)
        rest = self.options.epochs % stages if number == stages - 1 else 0
        return max(1, self.options.epochs // stages + rest)


def asks_for_logger(overrides: Sequence[str]) -> bool:
    """Whether ``overrides`` choose a logger."""
    return any(override.startswith("logger=") for override in overrides)


def measuring_seconds(measurement: Measurement, prompts: int | None) -> float:
    """What a measurement takes on two CPU cores, about: loading, the prompts (None: all of the embedded default)."""
    return _LOADING + measurement.cost * (_PROMPTS if prompts is None else prompts)
