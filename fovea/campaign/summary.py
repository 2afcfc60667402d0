"""What a campaign says: its stages beforehand, every command, and what was trained and measured at its end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from fovea.app.launch import composed
from fovea.app.provenance import provenance
from fovea.campaign.jobs import Job, read_record
from fovea.campaign.plan import Stage, trainings_of
from fovea.campaign.runner import Campaign, asks_for_logger, measuring_seconds
from fovea.evaluation.table import markdown_table

SUMMARY = "evidence"
#: Numbers beside each measurement.
_HEADLINE = ("tau", "speedup", "exact_matches")


def listing(stages: Sequence[Stage], prompts: int | None) -> list[list[str]]:
    """Heading and a row per stage: measurements, prompts of each, minutes of decoding and of training, and what it is.

    Minutes are those of two CPU cores on the embedded default; a drafter counts where it is first needed.
    """
    rows = [["stage", "measurements", "prompts", "decoding", "drafters to train once", "training", "what it shows"]]
    seen: set[str] = set()
    totals = [0.0, 0.0]
    for stage in stages:
        needed = [training for training in trainings_of([stage]) if training.name not in seen]
        seen |= {training.name for training in needed}
        most = min((n for n in (stage.prompts, prompts) if n is not None), default=None)
        seconds = sum(measuring_seconds(measurement, most) for measurement in stage.measurements)
        learned = sum(training.seconds for training in needed)
        totals = [totals[0] + seconds, totals[1] + learned]
        shown = "all" if most is None else str(most)
        numbers = [str(len(stage.measurements)), shown, _minutes(seconds), str(len(needed)), _minutes(learned)]
        rows.append([stage.name, *numbers, stage.about])
    counts = [str(sum(len(stage.measurements) for stage in stages)), "", _minutes(totals[0])]
    rows.append(["all", *counts, str(len(seen)), _minutes(totals[1]), "about, on two CPU cores"])
    return rows


def commands(campaign: Campaign, page: Sequence[str]) -> str:
    """A shell script of every command, in the order in which they are run, from the project's folder."""
    lines = ["# Every run of this campaign, to be repeated one by one in the project's folder."]
    for training in trainings_of(campaign.stages):
        lines += ["", f"# drafter: {training.name}", *(job.command for job in campaign.jobs_of(training))]
    for stage in campaign.stages:
        lines += ["", f"# {stage.name}: {stage.about}"]
        lines += [campaign.job_of(stage, measurement).command for measurement in stage.measurements]
    lines += ["", "# the page", shlex.join(["python", "-m", "fovea.evaluation.report", *page])]
    return "\n".join(lines) + "\n"


def shown_folders(campaign: Campaign, *, measured: bool = False) -> list[str]:
    """What the page is made of: the stages' folders, and the runs that measure themselves.

    With ``measured`` those without a single finished measurement are left out: the page would be refused for them.
    """
    own = {
        campaign.options.out / stage.name: [campaign.job_of(stage, one).folder for one in stage.measurements]
        for stage in campaign.stages
    }
    own |= {campaign.folder_of(one): [campaign.folder_of(one)] for one in trainings_of(campaign.stages) if one.measured}
    return [str(folder) for folder, jobs in own.items() if (any(map(read_record, jobs)) if measured else jobs)]


def write_summary(campaign: Campaign) -> str:
    """Writes ``evidence.md`` and ``evidence.json`` into the campaign's folder; returns what the console should say."""
    report, out = campaign.report, campaign.options.out
    trained = [(training.name, job) for training in trainings_of(campaign.stages) for job in campaign.jobs_of(training)]
    measured = _measurements(campaign)
    words = [
        _counted("drafters", "trained", trained, report.trained),
        _counted("measurements", "made", measured, report.measured),
    ]
    if report.older:
        words.append(f"Trained by other code, and kept (--retrain trains anew): {', '.join(report.older)}.")
    words += [f"FAILED {name}: {why}" for name, why in report.failed.items()]
    tables = [
        ("Trained", _table(trained, report.trained, ())),
        ("Measured", measured_rows(campaign)),
    ]
    body = [part for title, table in tables for part in (f"## {title}", markdown_table(table))]
    text = "\n\n".join(["# Evidence", "\n\n".join(words), *body, "Commands are in `commands.sh`."])
    (out / f"{SUMMARY}.md").write_text(f"{text}\n", encoding="utf-8")
    content = {
        "provenance": provenance(),
        "failed": report.failed,
        "trained_by_other_code": report.older,
        "trained": [_record(name, job, report.trained) for name, job in trained],
        "measured": [_record(name, job, report.measured) for name, job in measured],
    }
    (out / f"{SUMMARY}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return "\n".join([*words, f"what was done is in {out / SUMMARY}.md"])


def measured_rows(campaign: Campaign) -> list[list[str]]:
    """Heading and a row per measurement: when it was made, how long it took, and its headline numbers."""
    return _table(_measurements(campaign), campaign.report.measured, _HEADLINE)


def _measurements(campaign: Campaign) -> list[tuple[str, Job]]:
    return [
        (f"{stage.name}/{measurement.name}", campaign.job_of(stage, measurement))
        for stage in campaign.stages
        for measurement in stage.measurements
    ]


def track(campaign: Campaign, shown: Sequence[Path]) -> None:
    """Tells W&B of the page over ``shown``, its tables and its plots, where the campaign's runs tell it something."""
    options = campaign.options
    if not asks_for_logger(options.overrides):
        return
    from fovea.app.tracking import log_sweep  # which brings torch in

    own = [*options.overrides, f"paths.output_dir={options.out}", f"name={SUMMARY}"]
    cfg = composed("evaluate", own)
    log_sweep(cfg, options.out, measured_rows(campaign), [folder for folder in shown if folder.is_dir()])


def _counted(things: str, done: str, jobs: Sequence[tuple[str, Job]], new: Sequence[Path]) -> str:
    fresh = [record for _, job in jobs if job.folder in new and (record := read_record(job.folder))]
    there = [job for _, job in jobs if job.folder not in new and read_record(job.folder)]
    minutes = _minutes(sum(record.seconds for record in fresh))
    return f"{len(fresh)} of {len(jobs)} {things} were {done} in this call, in {minutes}; {len(there)} were there."


def _table(jobs: Sequence[tuple[str, Job]], new: Sequence[Path], metrics: Sequence[str]) -> list[list[str]]:
    rows = [["run", "when", "seconds", *(name.replace("_", " ") for name in metrics)]]
    for name, job in jobs:
        record = read_record(job.folder)
        if record is None:
            rows.append([name, "missing", "", *("" for _ in metrics)])
            continue
        found = [f"{record.metrics[key]:.3f}" if key in record.metrics else "" for key in metrics]
        when = "in this call" if job.folder in new else "before"
        rows.append([name, when, f"{record.seconds:.0f}", *found])
    return rows


def _record(name: str, job: Job, new: Sequence[Path]) -> dict[str, object]:
    record = read_record(job.folder)
    own = {} if record is None else {"seconds": record.seconds, "metrics": record.metrics, "code": record.code}
    return {"name": name, "command": job.command, "settings": job.settings, "in_this_call": job.folder in new, **own}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
