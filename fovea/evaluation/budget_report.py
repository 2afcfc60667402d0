"""The report of a visual-budget measurement: ``budget.md`` and its plots, beside ``budget.json`` in the same folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.evaluation import budget_plots as plots
from fovea.evaluation.budget_results import BUDGET_SAMPLES, BudgetResult
from fovea.evaluation.diagnostics import DEFINITIONS
from fovea.evaluation.results import ALL
from fovea.evaluation.style import save
from fovea.evaluation.table import markdown_table
from fovea.files import write_text

BUDGET_REPORT = "budget.md"
_PICTURES = {
    "budget_preferred": "Which budget a state prefers, and whether the low budget is enough.",
    "budget_position": "Demand along the answer.",
    "focus_movement": "How much the focus moves from step to step along the answer.",
}


def write_budget_report(folder: Path) -> BudgetResult:
    """Writes ``budget.md`` and plots into the ``folder`` of a saved measurement; returns what it reports.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    result = BudgetResult.load(folder)
    figures = result.figures()
    drawn = {}
    if figures[ALL]["budget"]["states"]:
        drawn["budget_preferred"] = plots.preferred_budgets(figures, result.settings)
        drawn["budget_position"] = plots.demand_by_position(figures[ALL]["budget"])
    if any(figures[ALL][focus]["movements"] for focus in ("attended", "retrieved")):
        drawn["focus_movement"] = plots.focus_by_position(figures[ALL], result.settings)
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.png")
    write_text(folder / BUDGET_REPORT, _markdown(result, figures, list(drawn)))
    return result


def summary(folder: Path, link: str) -> list[str]:
    """Paragraphs for the report of the evaluation whose folder is ``folder`` and, seen from that report, ``link``."""
    result = BudgetResult.load(folder)
    figures = result.figures()
    return [
        "## Visual budgets",
        headline(figures[ALL]["budget"]),
        markdown_table(by_ratio(figures[ALL]["budget"])),
        *(f"{text}\n\n![{n}]({link}/{n}.png)" for n, text in _PICTURES.items() if (folder / f"{n}.png").is_file()),
        f"Families, early and late states and definitions are in [{BUDGET_REPORT}]({link}/{BUDGET_REPORT}).",
    ]


def headline(budget: Mapping[str, Any]) -> str:
    """What the budgets say, in words."""
    if not budget["states"]:
        return "No answer about a picture was long enough for a draft-verify round, so no state was measured."
    shares = budget["preferred_share"]
    best = max(shares, key=shares.__getitem__)
    full = list(shares)[-1]
    return (
        f"Of {budget['states']:,} decoding states of {budget['samples']} answers, **{shares[best]:.1%}** prefer a "
        f"visual budget of {float(best):.0%} and {shares[full]:.1%} full access. Where budgets accept as many drafts, "
        f"the smallest is preferred: {1 - budget['all']['sensitive']:.1%} of the states accept as many under all."
    )


def by_ratio(budget: Mapping[str, Any]) -> list[list[str]]:
    """Heading and a row per budget."""
    rows = [["visual budget", "states that prefer it", "accepted drafts per iteration"]]
    for ratio, share in budget["preferred_share"].items():
        rows.append([f"{float(ratio):.0%}", _share(share), _number(budget["mean_accepted"][ratio])])
    return rows


def by_family(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Heading and a row per question family."""
    rows = [["question family", "answers", "states", "under", "over", "matched", "best", "range", "sensitive"]]
    for name, own in figures.items():
        budget, states = own["budget"], own["budget"]["states"]
        supply = [_share(budget[kind] / states if states else None) for kind in ("under", "over", "matched")]
        means = budget["all"]
        cells = [_number(means["best"]), _number(means["range"]), _share(means["sensitive"])]
        rows.append([name, str(budget["samples"]), str(states), *supply, *cells])
    return rows


def by_interval(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Heading and two rows per question family: early and late states."""
    rows = [["question family", "interval", "states", "best", "range", "sensitive", "attended", "retrieved"]]
    for name, own in figures.items():
        for interval in ("early", "late"):
            means = own["budget"][interval]
            moved = [_number(own[focus][interval]) for focus in ("attended", "retrieved")]
            cells = [_number(means["best"]), _number(means["range"]), _share(means["sensitive"])]
            rows.append([name, interval, str(means["states"]), *cells, *moved])
    return rows


def _markdown(result: BudgetResult, figures: Mapping[str, Mapping[str, Any]], pictures: list[str]) -> str:
    settings, pooled = result.settings, figures[ALL]
    low, high = (f"{settings[name]:.0%}" for name in ("low", "high"))
    parts = [
        f"# Visual budgets of {settings.get('method', 'the drafter')} on {settings.get('target', 'the target')}",
        headline(pooled["budget"]),
        "At every draft-verify iteration of an answer that is decoded with full access, the drafter also drafts from "
        "the same committed text with fewer visual tokens: those to which the target's last layer, averaged over heads "
        "and the queries of that text from the first picture on, attends most. They restrict both what its context "
        "holds of the pictures and what it retrieves from. Accepted drafts leave the bonus token out, and end where "
        "the answer ends.",
        markdown_table(by_ratio(pooled["budget"])),
        "## By question family",
        f"Under, over: {low} of the visual tokens accept fewer, more drafts than {high}.",
        markdown_table(by_family(figures)),
        "## Early and late in the answer",
        markdown_table(by_interval(figures)),
        f"The last two columns are mean Jaccard distances of adjacent sets. *Attended*: the {settings['focus_tokens']} "
        "visual tokens that the target's last layer attends to most at each step of the answer. *Retrieved*: what the "
        "root retrieves at each iteration with full access, if the drafter retrieves.",
        _unmovable(result),
        "\n".join(_compared(pooled)),
        *(f"![{name}]({name}.png)" for name in pictures),
        "## What the words mean",
        "\n".join(f"- **{name}**: {meaning}." for name, meaning in DEFINITIONS.items()),
        *_left_out(result),
        f"Every answer is a line of `{BUDGET_SAMPLES}`. `python -m fovea.evaluation.budget_report <this folder>` makes "
        "this report again.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _compared(pooled: Mapping[str, Any]) -> list[str]:
    """How many answers are higher late than early."""
    sayings = {
        "budget": "the mean preferred budget is larger late",
        "attended": "the attended focus moves more late",
        "retrieved": "the retrieved focus moves more late",
    }
    return [
        f"- In {own['late_higher']} of {own['eligible_samples']} answers ({own['late_higher_share']:.1%}) {saying}."
        for saying, own in ((saying, pooled[part]) for part, saying in sayings.items())
        if own["eligible_samples"]
    ]


def _unmovable(result: BudgetResult) -> str:
    """A warning where the focus holds all there is."""
    focus = result.settings["focus_tokens"]
    count = sum(sample.visual_tokens <= focus for sample in result.samples)
    if not count:
        return ""
    return (
        f"In {count} of {len(result.samples)} answers there are no more than {focus} visual tokens, so the attended "
        "focus holds all of them and cannot move; a smaller `diagnostics.focus_tokens` tells more."
    )


def _left_out(result: BudgetResult) -> list[str]:
    parts = []
    if result.text_only:
        parts.append(
            f"Prompts without a picture have no visual tokens, and so no budget; they are in no figure: "
            f"{len(result.text_only)}."
        )
    if result.failed:
        parts.append(f"Prompts that could not be read, and are in no figure: {len(result.failed)}.")
        parts.append("\n".join(f"- `{key}`: {why}" for key, why in result.failed.items()))
    return ["## Left out", *parts] if parts else []


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Makes the report of a measurement again, from its folder."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m fovea.evaluation.budget_report <folder of an evaluation>")
    try:
        write_budget_report(Path(sys.argv[1]))
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    print(f"report in {Path(sys.argv[1]) / BUDGET_REPORT}")


if __name__ == "__main__":
    main()
