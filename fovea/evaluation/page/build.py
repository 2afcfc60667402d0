"""Puts the page together: one HTML file that needs no network, and its tables as Markdown, LaTeX and CSV beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from fovea.evaluation import budget_plots, plots
from fovea.evaluation.diagnostics import DEFINITIONS as BUDGET_DEFINITIONS
from fovea.evaluation.page import charts, comparison, study_charts
from fovea.evaluation.page.entries import Entry, find_entries
from fovea.evaluation.page.published_table import HERE, PublishedTable
from fovea.evaluation.page.studies import BUDGETS, EPOCHS, TREES, Study
from fovea.evaluation.page.study_tables import Table
from fovea.evaluation.page.svg import inline_svg
from fovea.evaluation.page.take_along import PageTables, write_tables
from fovea.evaluation.page.trajectories import viewer_data
from fovea.evaluation.results import ALL, DEFINITIONS
from fovea.files import write_text

#: Below the plots of studies.
_POINTS = "Bars: 95 % intervals over conversations; dashed: the first row. A pointer on a point is told its figures."
#: Name of a page in the folder that it is about.
PAGE = "page.html"
#: Suffix of a file beside the page -> what it is called there, and what writes it.
EXPORTS = {
    ".md": ("Markdown", comparison.markdown),
    ".tex": ("LaTeX", comparison.latex),
    ".csv": ("CSV", comparison.comma_separated),
}


def page_over(folders: Sequence[Path], path: Path) -> list[Path]:
    """The page at ``path`` over all evaluations in ``folders``; returns what was written, the page first.

    Raises:
        FileNotFoundError: a folder holds none.
    """
    entries, without = find_entries(folders)
    return write_page(entries, path, without)


def write_page(entries: Sequence[Entry], path: Path, without: Mapping[str, str] | None = None) -> list[Path]:
    """Writes the page at ``path``, the comparison in three formats beside it, and all other tables in a folder.

    The comparison has the name of the page; the folder is called so too, with ``_tables`` behind it.

    Args:
        entries: the evaluations, at least one.
        path: of the HTML file.
        without: jobs that have no evaluation -> how they ended.

    Returns:
        What was written, the page first.
    """
    entries = sorted(entries, key=lambda entry: -(entry.pooled["tau"] or 0.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    exports = {suffix: write(entries) for suffix, (_, write) in EXPORTS.items()}
    tables = PageTables.over(entries)
    folder = tables_folder(path)
    write_text(path, _page(entries, tables, exports, without or {}, folder.name))
    written = [path]
    for suffix, text in exports.items():
        written.append(path.with_suffix(suffix))
        write_text(written[-1], text)
    return [*written, *write_tables(tables.to_take(), folder)]


def tables_folder(path: Path) -> Path:
    """Where the tables of the page at ``path`` lie."""
    return path.with_name(f"{path.stem}_tables")


def _page(
    entries: Sequence[Entry], tables: PageTables, exports: Mapping[str, str], without: Mapping[str, str], folder: str
) -> str:
    here = files("fovea.evaluation.page")
    css, script, template = (
        (here / name).read_text(encoding="utf-8") for name in ("page.css", "viewer.js", "page.html.jinja")
    )
    studies = [_section(study, own, tables.published) for study, own in tables.studies]
    told = {study["name"] for study in studies}
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            title=_title(entries),
            lead=_lead(entries),
            warnings=comparison.warnings(entries),
            css=Markup(css),
            script=Markup(script),
            comparison=tables.comparison,
            acceptance=tables.acceptance,
            times=tables.times,
            everything=tables.everything,
            unread=[(entry.label, list(entry.result.failed)) for entry in entries if entry.result.failed],
            folder=folder,
            intervals=DEFINITIONS["intervals"],
            unmeasured=without,
            conditions=comparison.conditions(entries),
            trajectories=Markup(viewer_data(entries)),
            plots=[_drawn(*plot) for plot in _plots(tables.main)],
            studies=studies,
            here=HERE,
            published=[table for table in tables.published if table.study not in told],
            exports=[(EXPORTS[suffix][0], text) for suffix, text in exports.items()],
            definitions=DEFINITIONS | BUDGET_DEFINITIONS if BUDGETS in told else DEFINITIONS,
            footer="Made by python -m fovea.evaluation.report from saved traces; every figure can be made again.",
        )
        + "\n"
    )


def _drawn(name: str, caption: str, figure: Figure) -> dict[str, Any]:
    return {"name": name, "caption": caption, "svg": Markup(inline_svg(figure, name, caption))}


def _section(study: Study, tables: Sequence[Table], published: Sequence[PublishedTable]) -> dict[str, Any]:
    """What the page shows of a study: its tables and plots, and the papers' tables beside them."""
    return {
        "name": study.name,
        "title": study.title,
        "words": study.words,
        "tables": tables,
        "plots": [_drawn(*plot) for plot in _study_plots(study)],
        "published": [table for table in published if table.study == study.name],
    }


def _study_plots(study: Study) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption and figure of every plot of a study."""
    if study.name == EPOCHS:
        yield "training", "Measured after each epoch of training.", charts.training_curves(study.entries)
    elif study.name == BUDGETS:
        for number, entry in enumerate(study.entries, start=1):
            yield from _budget_plots(entry, number)
        if len(study.entries) > 1 and all(e.budgets and e.budgets.samples for e in study.entries):
            caption = "Drafts accepted under every visual budget, and which budget a state prefers."
            yield "budgets-compared", caption, study_charts.accepted_by_budget(study)
    elif any(entry.pooled["rounds"] for entry in study.entries):
        draw = {"depths": study_charts.over_depth, TREES: study_charts.over_trees}.get(study.name, study_charts.effects)
        yield (
            f"study-{study.name}",
            "Bars: 95 % intervals over conversations. Rest on a point for its figures.",
            draw(study),
        )


def page_plots(tables: PageTables) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption and figure of every plot of the page, those of its studies among them."""
    yield from _plots(tables.main)
    for study, _ in tables.studies:
        yield from _study_plots(study)


def _title(entries: Sequence[Entry]) -> str:
    methods = list(dict.fromkeys(entry.method for entry in entries))
    if len(entries) == 1:
        return f"{methods[0]}: speculative decoding, measured"
    return f"{len(entries)} evaluations of {methods[0] if len(methods) == 1 else f'{len(methods)} methods'}"


def _lead(entries: Sequence[Entry]) -> str:
    """The best of the evaluations in a sentence, and whether all were lossless; those that were not are no best."""
    answers = sum(entry.pooled["samples"] for entry in entries)
    exact = sum(entry.pooled["exact"] for entry in entries)
    ties = sum(entry.pooled["ties"] for entry in entries)
    equal = f"{exact:,} of {answers:,} answers equal the target's own, token for token"
    if ties:
        equal += f", and {ties:,} leave them at a near-tie of its logits"
    if wrong := sum(entry.pooled["unexplained"] for entry in entries):
        equal += f", and {wrong:,} differ{'s' if wrong == 1 else ''} without an explanation"
    sound = [entry for entry in entries if not (entry.pooled["unexplained"] or entry.ended)]
    if not sound:
        return f"No measurement here is sound, see above. {equal}."
    known = [entry for entry in sound if entry.pooled["tau"] is not None]
    if not known:
        return f"{equal}. No answer was long enough for a draft-verify round."
    longest, fastest = known[0], max(known, key=lambda entry: entry.pooled["speedup"])
    most = f"{longest.label} commits {longest.pooled['tau']:.2f} tokens per round"
    if longest is fastest:
        return f"{most} and is {fastest.pooled['speedup']:.2f} times as fast as the target alone. {equal}."
    return (
        f"Most tokens per round: {longest.label}, {longest.pooled['tau']:.2f}. Fastest: {fastest.label}, "
        f"{fastest.pooled['speedup']:.2f} times as fast as the target alone. {equal}."
    )


def _plots(entries: Sequence[Entry]) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption and figure of every plot that there is data for."""
    known = [entry for entry in entries if entry.pooled["rounds"]]
    if known:
        caption = (
            "End-to-end speedup over tokens per round, with 95 % intervals. A proposer that costs more lies lower."
        )
        yield "speed-against-tau", caption, charts.speed_against_tau(known)
        caption = "How deep the target follows the drafts."
        yield "acceptance-by-depth", caption, charts.acceptance_by_depth(known)
        columns, rows = comparison.families(known, "tau")
        if len(columns) > 2:
            caption = "Tokens per round by question family; the last column pools them."
            yield "tau-by-family", caption, charts.heat_table("tau by question family", columns, rows, "{:.2f}")
        caption = "Where the time of a draft-verify round goes; the mark is one autoregressive token."
        yield "round-time", caption, plots.round_time({entry.label: entry.pooled for entry in known})
    retrieving = [entry for entry in entries if charts.has_cardinalities(entry)]
    if retrieving:
        caption = "How much visual evidence a draft node retrieves, and how that changes along an answer."
        if len(retrieving) > charts.MOST_CARDINALITIES:
            caption += f" The first {charts.MOST_CARDINALITIES} of {len(retrieving)} evaluations."
        yield "cardinalities", f"{caption} Dotted: the rule's limits.", charts.cardinalities(retrieving)


def _budget_plots(entry: Entry, number: int) -> Iterator[tuple[str, str, Figure]]:
    assert entry.budgets is not None
    figures, settings = entry.budgets.figures(), entry.budgets.settings
    pooled = figures[ALL]
    if pooled["budget"]["states"]:
        caption = f"{entry.label}: which visual budget a state prefers, and whether the low budget is enough."
        yield f"budget-preferred-{number}", caption, budget_plots.preferred_budgets(figures, settings)
        caption = f"{entry.label}: demand for visual tokens along the answer."
        yield f"budget-position-{number}", caption, budget_plots.demand_by_position(pooled["budget"])
    if any(pooled[focus]["movements"] for focus in ("attended", "retrieved")):
        caption = f"{entry.label}: how much the focus moves from step to step."
        yield f"budget-focus-{number}", caption, budget_plots.focus_by_position(pooled, settings)
