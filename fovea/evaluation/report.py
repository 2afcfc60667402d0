"""The report of a run: ``report.md`` for people, ``report.json`` for programs, and the figures as PNG.

Everything is computed from what lies in the run's folder, so ``python -m fovea.evaluation.report <run folder>`` makes
it again from the saved traces. The same command writes one page over any number of evaluations, see
:mod:`fovea.evaluation.page`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from fovea.evaluation import budget_report, plots
from fovea.evaluation.bootstrap import BY_DEPTH, RESAMPLES
from fovea.evaluation.budget_results import BUDGET
from fovea.evaluation.compression import compression_figures, usage_table
from fovea.evaluation.history import TrainingHistory, reported_evaluation
from fovea.evaluation.json_lines import RecordError, read_object
from fovea.evaluation.results import ALL, DEFINITIONS, EVIDENCE, SpeedResult
from fovea.evaluation.style import save
from fovea.evaluation.table import COLUMNS, INTERVAL, console_table, interval_rows, markdown_table, rows
from fovea.files import write_text

REPORT, PLOTS = "report", "plots"
#: Most keys of prompts that could not be read on the console.
_MOST_KEYS = 10


def write_report(run: Path) -> SpeedResult:
    """Writes ``report.md``, ``report.json`` and ``plots/`` into the run's folder ``run``.

    It reports the final evaluation, or that of the last epoch if the run ended before. Provenance is taken from
    ``provenance.json``, if it is there.

    Returns:
        The result that is reported.

    Raises:
        FileNotFoundError: the run holds no evaluation.
        RecordError: a file of it is damaged.
    """
    folder = reported_evaluation(run)
    result, history = SpeedResult.load(folder), TrainingHistory.read(run)
    provenance_file = run / "provenance.json"
    provenance = read_object(provenance_file) if provenance_file.is_file() else {}
    pictures = {name: save(figure, run / PLOTS / f"{name}.png") for name, figure in _figures(result, history)}
    if (folder / EVIDENCE).is_file():
        pictures["evidence"] = folder / EVIDENCE
    links = {name: path.relative_to(run).as_posix() for name, path in pictures.items()}
    record = _record(result, history, provenance, folder.relative_to(run).as_posix(), links)
    write_text(run / f"{REPORT}.json", json.dumps(record, indent=2) + "\n")
    budgets = budget_report.summary(folder, record["evaluation"]) if (folder / BUDGET).is_file() else []
    write_text(run / f"{REPORT}.md", _markdown(record, budgets))
    return result


def print_table(result: SpeedResult, console: Console | None = None) -> None:
    """The short table that ends a run, and what each column means."""
    console = console or Console()
    figures, settings = result.figures(), result.settings
    console.print(console_table(figures, f"{settings['method']} on {_target(settings)}, {settings['device']}"))
    headings = rows(figures)[0]
    for column in COLUMNS:
        if column.heading in headings:
            console.print(f"[dim]{column.heading}: {column.meaning}[/dim]")
    if result.failed:
        first = ", ".join(list(result.failed)[:_MOST_KEYS]) + (", ..." if len(result.failed) > _MOST_KEYS else "")
        console.print(_unread(result.failed), first, markup=False)


def _figures(result: SpeedResult, history: TrainingHistory) -> Iterator[tuple[str, Figure]]:
    """The plots that these results have data for."""
    figures = result.figures()
    yield "speed_by_family", plots.speed_by_family(figures, result.settings.get("most_tokens_per_round"))
    if figures[ALL]["rounds"]:
        yield "acceptance_by_depth", plots.acceptance_by_depth(figures[ALL])
        yield "round_time", plots.round_time(figures)
    if any(r.retrieval for trace in result.speculative for r in trace.rounds):
        yield "retrieval_cardinality", plots.retrieval_cardinality(result.speculative, result.retrieval_limits)
    if history.losses or history.evaluations:
        yield "training_curves", plots.training_curves(history)


def _record(
    result: SpeedResult,
    history: TrainingHistory,
    provenance: dict[str, Any],
    evaluation: str,
    pictures: dict[str, str],
) -> dict[str, Any]:
    return {
        "evaluation": evaluation,
        "summary": result.summary(),
        "figures": result.figures(),
        "definitions": DEFINITIONS,
        "settings": result.settings,
        "differences": [str(p.comparison) for p in result.prompts if p.comparison.outcome != "exact"],
        "failed": result.failed,
        "compression": compression_figures(result.speculative),
        "epochs": [{"epoch": epoch, **figures} for epoch, figures in history.evaluations],
        "pictures": pictures,
        "provenance": provenance,
    }


#: Beside the counts of sampled answers.
_SAMPLED = (
    "The answers are sampled. What is drawn is the target's own distribution: a draft is accepted if it is the token "
    "that the target draws. Both loops draw with the same noise, which belongs to the seed, the prompt and the place "
    "in the answer, so their answers are compared token for token as greedy ones are, and only rounding can part them."
)

#: Entries of a selection that are not settings of transformers.
_DESCRIBED = ("generation_config", "temperature", "seed", "set_aside")

_PICTURES = {
    "speed_by_family": "Accept length and speedup per question family.",
    "acceptance_by_depth": "How deep the target follows the drafts.",
    "round_time": "Where the time of a draft-verify round goes; the black mark is one autoregressive token.",
    "retrieval_cardinality": "How much visual evidence the draft nodes retrieved.",
    "evidence": "The evidence that the root of a draft tree retrieved, at some steps of one answer. "
    "Darker cells weigh more; cells with an outline were selected.",
    "training_curves": "The course of the training.",
}


def _markdown(record: dict[str, Any], more: list[str]) -> str:
    """The report; ``more`` is what was measured beside speed."""
    settings, pooled = record["settings"], record["figures"][ALL]
    table = rows(record["figures"])
    parts = [
        f"# {settings['method']} on {_target(settings)}",
        _headline(record),
        markdown_table(table),
        "\n".join(f"- **{c.heading}**: {c.meaning}." for c in COLUMNS if c.heading in table[0]),
        *_intervals(record),
        *_by_depth(pooled),
        "## Is it lossless?",
        f"Of {pooled['samples']} answers, {pooled['exact']} equal the autoregressive ones token for token, "
        f"{pooled['ties']} leave them at a near-tie of the target's own logits, and {pooled['unexplained']} differ "
        "without an explanation.",
        _beside_transformers(pooled.get("differ_from_transformers", 0), settings.get("dtype", "")),
        _SAMPLED if _temperature(settings) else "",
        _listed(record["differences"]),
    ]
    if record["failed"]:
        parts += [_unread(record["failed"])]
        parts += [_listed([f"`{key}`: {why}" for key, why in record["failed"].items()])]
    if record["compression"]:
        parts += [
            "## Compressed pictures",
            "What stood for the pictures in the drafter's context: rows in the place of their visual tokens, and how "
            "often the gate took each branch (its mean weight, if it blends them).",
            markdown_table(usage_table(record["compression"])),
        ]
    parts += ["## Pictures"]
    parts += [
        f"{_PICTURES[name]}\n\n![{name}]({record['pictures'][name]})"
        for name in _PICTURES
        if name in record["pictures"]
    ]
    parts += more
    if record["epochs"]:
        headings = ("epoch", "tau", "speedup", "decode_speedup", "exact_matches")
        course = [[_cell(epoch[name]) for name in headings] for epoch in record["epochs"]]
        parts += ["## After each epoch", markdown_table([[name.replace("_", " ") for name in headings], *course])]
    parts += ["## How it was decoded", markdown_table([["setting", "value"], *_flat(settings)], numbers=False)]
    if record["provenance"]:
        parts += [
            "## Where it comes from",
            markdown_table([["", "value"], *_flat(_short(record["provenance"]))], numbers=False),
        ]
    parts += [
        f"All figures with their definitions are in [{REPORT}.json]({REPORT}.json), every answer and every round in "
        f"`{record['evaluation']}/traces.jsonl`. `python -m fovea.evaluation.report <this folder>` makes this report "
        "again."
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _intervals(record: dict[str, Any]) -> list[str]:
    table = interval_rows(record["figures"])
    if not table:
        return []
    resamples = record["settings"].get("resamples", RESAMPLES)
    words = (
        f"How far these figures would move with other prompts of the same kind: 95 % intervals of {resamples} "
        "bootstrap resamples, in which conversations are drawn with replacement. "
        "They say nothing about other machines or seeds."
    )
    return [words, markdown_table(table)]


def _by_depth(pooled: Mapping[str, Any]) -> list[str]:
    """Acceptance by depth over all families, with its intervals."""
    depths = range(len(pooled["reach_rate"]))
    if not depths:
        return []
    rows = [["depth k", "of all rounds", INTERVAL, "of rounds with k - 1 and a tree so deep", INTERVAL]]
    for k in depths:
        row = [str(k + 1)]
        for figure in BY_DEPTH:
            share, bounds = pooled[figure][k], pooled["intervals"][figure][k]
            row.append("-" if share is None else f"{share:.1%}")
            row.append(" to ".join(f"{bound:.1%}" for bound in bounds) if bounds else "-")
        rows.append(row)
    return ["Rounds with k or more accepted drafts:", markdown_table(rows)]


def _unread(failed: Mapping[str, str]) -> str:
    return f"Prompts that could not be read, and are in no figure: {len(failed)}."


def _headline(record: dict[str, Any]) -> str:
    settings, pooled = record["settings"], record["figures"][ALL]
    if pooled["tau"] is None:
        return "No answer was long enough for a draft-verify round."
    wrong = pooled["unexplained"]
    warning = f"**Warning: {wrong} of {pooled['samples']} answers differ without an explanation.** " if wrong else ""
    return (
        f"{warning}The drafter commits **{pooled['tau']:.2f} tokens per round** (tau) and decodes "
        f"**{pooled['decode_speedup']:.2f} times** as fast as the target alone, **{pooled['speedup']:.2f} times** with "
        f"image and prompt processing, over {pooled['samples']} answers of at most {settings['max_new_tokens']} tokens "
        f"({settings['dtype']}, {settings['device']}, batch 1, {_rule(settings)})."
    )


def _target(settings: Mapping[str, Any]) -> str:
    """Name of the target's checkpoint; of results that do not have it, its architecture."""
    return settings.get("target_name") or settings["target"]


def _temperature(settings: dict[str, Any]) -> float:
    return settings.get("selection", {}).get("temperature", 0.0)


def _rule(settings: dict[str, Any]) -> str:
    """The selection of tokens in a few words."""
    selection = settings.get("selection", {})
    temperature = _temperature(settings)
    words = [f"temperature {temperature:g}" if temperature else "greedy"]
    more = {name: selection[name] for name in selection if name not in _DESCRIBED}
    return ", ".join([*words, *(f"{name} {value}" for name, value in more.items())])


def _beside_transformers(differ: int, dtype: str) -> str:
    """What it means that so many answers are not those of transformers' ``generate``."""
    if not differ:
        return ""
    why = "the target is not run as its model would be" if dtype == "float32" else f"near-ties of {dtype} may part them"
    return f"transformers' own `generate` answers {differ} of the prompts that it was asked otherwise: {why}."


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _cell(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _flat(record: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Rows of dotted names and values."""
    out = []
    for name, value in record.items():
        out += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [[f"{prefix}{name}", f"`{value}`"]]
    return out


def _short(provenance: dict[str, Any]) -> dict[str, Any]:
    """Without the records of earlier calls, and of the fingerprints the target's alone: the file has them all."""
    kept = {name: value for name, value in provenance.items() if name not in ("earlier", "fingerprints")}
    target = provenance.get("fingerprints", {}).get("target")
    return kept if target is None else kept | {"target": target}


def main() -> None:
    """The page over all evaluations in some folders; of a single run its report too."""
    from fovea.evaluation.page.build import PAGE, write_page
    from fovea.evaluation.page.entries import find_entries

    parser = argparse.ArgumentParser(
        prog="python -m fovea.evaluation.report",
        description="Writes one HTML page over all evaluations in the given folders, complete in itself, and its table "
        "of comparison as Markdown, LaTeX and CSV beside it. Of a single run it makes report.md again too.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="of a run, an evaluation or a sweep")
    parser.add_argument(
        "--out", type=Path, help=f"the page (default: {PAGE} in the folder, or here if there are several)"
    )
    args = parser.parse_args()
    if args.out is not None and args.out.suffix != ".html":
        parser.error(
            f"--out {args.out} is not the name of a page; give one that ends in .html, its tables lie beside it"
        )
    try:
        entries, without = find_entries(args.folders)
        if len(args.folders) == 1 and entries[0].job == args.folders[0]:
            print_table(write_report(args.folders[0]))
            print(f"report in {args.folders[0] / REPORT}.md")
        out = args.out or (args.folders[0] if len(args.folders) == 1 else Path()) / PAGE
        for path in write_page(entries, out, without):
            print(path)
    except (FileNotFoundError, RecordError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
