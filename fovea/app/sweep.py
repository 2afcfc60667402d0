"""The end of a sweep: one table and one plot over all of its jobs, in the sweep's folder."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from fovea.app.lost import record_lost_jobs
from fovea.app.outcome import FILE, Outcome
from fovea.app.typed import convert
from fovea.files import write_text


@dataclass(frozen=True)
class Job:
    """One job of a sweep: its folder's name, its overridden fields, and how it ended."""

    name: str
    fields: dict[str, str]
    outcome: Outcome


class SweepSummary(Callback):
    """Writes ``summary.csv``, ``summary.md``, ``summary.png`` and ``page.html``, and prints the table.

    Ends the process with exit code 1 if a job failed, in whatever way, after all of them have run.
    """

    def __init__(self, metrics: Sequence[str]) -> None:
        """``metrics``: names in the order of the columns; the first two are plotted."""
        self.metrics = list(metrics)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        record_lost_jobs()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from fovea.app.tracking import log_sweep  # these bring torch in, which --help can do without
        from fovea.evaluation.table import markdown_table

        folder = Path(config.hydra.sweep.dir)
        jobs = read_jobs(folder)
        typed = [str(override).split("=", 1)[0] for override in config.hydra.overrides.task]
        swept = list(dict.fromkeys([*typed, *(field for job in jobs for field in job.fields)]))
        rows = table(jobs, varying(jobs, swept), self.metrics)
        with (folder / "summary.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)
        text = markdown_table(rows) + "\n"
        write_text(folder / "summary.md", text)
        plot(jobs, varying(jobs, swept), self.metrics[:2], folder / "summary.png")
        failed = [job for job in jobs if job.outcome.status != "completed"]
        page = write_sweep_page(folder) if _wants_page(config) else None
        where = f"summary in {folder}" + (f", page in {page}" if page else "")
        print(f"\n{text}\n{len(jobs) - len(failed)} of {len(jobs)} jobs completed; {where}")
        for job in failed:
            print(f"job {job.name} {job.outcome.status}: {job.outcome.error} (its log is in {folder / job.name})")
        log_sweep(config, folder, rows)
        if failed:
            sys.stdout.flush()
            raise SystemExit(1)


def _wants_page(config: DictConfig) -> bool:
    page = OmegaConf.select(config, "page", default=True)
    return convert(page, bool, "page")


def write_sweep_page(folder: Path) -> Path | None:
    """One page over all jobs of the sweep in ``folder``, in it; None if they measured nothing."""
    from fovea.evaluation.page.build import PAGE, page_over

    try:
        return page_over([folder], folder / PAGE)[0]
    except FileNotFoundError:
        return None


def read_jobs(folder: Path) -> list[Job]:
    """The jobs of the sweep in ``folder``, in their order."""
    folders = sorted((path.parent for path in folder.glob(f"*/{FILE}")), key=lambda path: (len(path.name), path.name))
    outcomes = [Outcome.read(path) for path in folders]
    return [Job(path.name, outcome.fields(), outcome) for path, outcome in zip(folders, outcomes, strict=True)]


def varying(jobs: Sequence[Job], fields: Sequence[str]) -> list[str]:
    """Those of ``fields`` that differ between jobs; all of them if none does."""
    return [f for f in fields if len({job.fields.get(f) for job in jobs}) > 1] or list(fields)


def table(jobs: Sequence[Job], fields: Sequence[str], metrics: Sequence[str]) -> list[list[str]]:
    """Heading and one row per job."""
    measured = [name for name in metrics if any(name in job.outcome.metrics for job in jobs)]
    rows = [["job", *fields, "status", *measured]]
    for job in jobs:
        found = job.outcome.metrics
        values = [f"{found[name]:.4g}" if name in found else "" for name in measured]
        rows.append([job.name, *(job.fields.get(f, "") for f in fields), job.outcome.status, *values])
    return rows


def plot(jobs: Sequence[Job], fields: Sequence[str], metrics: Sequence[str], path: Path) -> None:
    """One panel per metric over the numeric field with most values, one line per setting of the other fields.

    Without a numeric field the jobs themselves are the axis.
    """
    from matplotlib.figure import Figure

    completed = [job for job in jobs if job.outcome.status == "completed"]
    axis = max((f for f in fields if _numeric(completed, f)), key=lambda f: _count(completed, f), default=None)
    figure = Figure(figsize=(5 * len(metrics), 3.6), layout="constrained")
    for panel, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        measured = [job for job in completed if metric in job.outcome.metrics]
        for label, group in _lines(measured, [f for f in fields if f != axis], axis).items():
            values = [job.outcome.metrics[metric] for _, job in group]
            panel.plot([x for x, _ in group], values, marker="o", label=label or None)
        panel.set_xlabel(axis or "job")
        panel.set_ylabel(metric)
        panel.grid(alpha=0.3)
        if any(panel.get_legend_handles_labels()):
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _lines(jobs: Sequence[Job], others: Sequence[str], axis: str | None) -> dict[str, list[tuple[Any, Job]]]:
    if axis is None:
        return {"": [(", ".join(job.fields[f] for f in others if f in job.fields), job) for job in jobs]}
    lines: dict[str, list[tuple[Any, Job]]] = {}
    for job in sorted(jobs, key=lambda job: float(job.fields[axis])):
        label = ", ".join(f"{f.rsplit('.', 1)[-1]}={job.fields.get(f, '')}" for f in others)
        lines.setdefault(label, []).append((float(job.fields[axis]), job))
    return lines


def _numeric(jobs: Sequence[Job], field: str) -> bool:
    try:
        return bool(jobs) and all(float(job.fields[field]) is not None for job in jobs)
    except (KeyError, ValueError):
        return False


def _count(jobs: Sequence[Job], field: str) -> int:
    return len({job.fields[field] for job in jobs})
