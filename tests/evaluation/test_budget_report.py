"""Report and plots of a visual-budget measurement, from made-up samples whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from PIL import Image

from fovea.evaluation import budget_plots
from fovea.evaluation.budget_report import by_family, by_interval, by_ratio, headline, summary, write_budget_report
from fovea.evaluation.budget_results import BudgetResult, BudgetSample
from fovea.evaluation.visual_budget import BudgetConfig

SETTINGS = asdict(BudgetConfig(focus_tokens=2)) | {"method": "fovea", "target": "a_target"}


def sample(key: str, source: str, accepted: list[list[int]], **changes) -> BudgetSample:
    attended = [[0, 1], [1, 2], [1, 2], [3, 4], [3, 5], [0, 1]]
    made = BudgetSample(key, source, 8, len(attended), accepted, attended, [[0, 1, 2]] * len(accepted))
    return replace(made, **changes)


@pytest.fixture
def result() -> BudgetResult:
    # Preferred: .75, 0, .25; 0, 0; 1. Supply of a quarter: under, matched, over; matched, matched; matched.
    samples = [
        sample("a", "signs", [[1, 2, 2, 3, 3], [2, 2, 2, 2, 2], [0, 4, 1, 3, 4]]),
        sample("b", "signs", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]),
        sample("c", "tables", [[0, 0, 0, 0, 2]], attended=[[0, 1]] * 4, visual_tokens=2),
    ]
    return BudgetResult(samples, ["t1", "t2"], {"bad": "image 'bad.png' cannot be opened"}, SETTINGS)


def test_tables_hold_the_figures(result):
    figures = result.figures()
    assert by_ratio(figures["all"]["budget"])[1:] == [
        ["0%", "50.0%", "0.667"],
        ["25%", "16.7%", "1.500"],
        ["50%", "0.0%", "1.000"],
        ["75%", "16.7%", "1.500"],
        ["100%", "16.7%", "2.000"],
    ]
    _, signs, tables, pooled = by_family(figures)
    assert signs == ["signs", "2", "5", "20.0%", "20.0%", "60.0%", "0.200", "1.200", "40.0%"]
    assert tables == ["tables", "1", "1", "0.0%", "0.0%", "100.0%", "1.000", "2.000", "100.0%"]
    assert pooled[:3] == ["all", "3", "6"]
    early, late = by_interval(figures)[1:3]
    # Early: the first two states of a and the first one of b.
    assert early[:6] == ["signs", "early", "3", "0.250", "0.667", "33.3%"]
    assert late[:6] == ["signs", "late", "2", "0.125", "2.000", "50.0%"]
    # Midpoints .1, .3, .5 | .7, .9 of the six steps.
    assert early[6:] == [f"{(2 / 3 + 0 + 1) / 3:.3f}", "0.000"]
    assert late[6] == f"{(2 / 3 + 1) / 2:.3f}"
    assert by_interval(figures)[3][:6] == ["tables", "early", "0", "-", "-", "-"]
    assert headline(figures["all"]["budget"]).startswith("Of 6 decoding states of 3 answers, **50.0%** prefer a visual")


def test_the_report_says_it_all(result, tmp_path):
    result.save(tmp_path)
    write_budget_report(tmp_path)
    text = (tmp_path / "budget.md").read_text()
    for piece in (
        "fovea on a_target",
        "25% of the visual tokens accept fewer, more drafts than 75%",
        "In 1 of 3 answers there are no more than 2 visual tokens",
        "they are in no figure: 2.",
        "image 'bad.png' cannot be opened",
        "In 0 of 2 answers (0.0%) the mean preferred budget is larger late.",
        "(Eq. 28)",
    ):
        assert piece in text
    for name in ("budget_preferred", "budget_position", "focus_movement"):
        assert Image.open(tmp_path / f"{name}.png").width > 600
        assert f"({name}.png)" in text
    short = "\n".join(summary(tmp_path, "evaluation/final"))
    assert "(evaluation/final/budget_preferred.png)" in short
    assert json.loads((tmp_path / "budget.json").read_text())["definitions"]["best"]


def test_plots_show_the_figures(result):
    figures = result.figures()
    left, right = budget_plots.preferred_budgets(figures, SETTINGS).axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx([1 / 2, 1 / 6, 0, 1 / 6, 1 / 6])
    assert [label.get_text() for label in right.get_yticklabels()] == ["signs (5)", "tables (1)", "all (6)"]
    assert [bar.get_width() for bar in right.patches[:3]] == pytest.approx([0.2, 0, 1 / 6])
    best, *_ = budget_plots.demand_by_position(figures["all"]["budget"]).axes
    assert best.lines[0].get_ydata()[[0, 5, 9]] == pytest.approx([0.375, 0, 0.125])
    assert {text.get_text() for text in best.texts} == {"early: 25.0%", "late: 12.5%"}
    (focus,) = budget_plots.focus_by_position(figures["all"], SETTINGS).axes
    assert len(focus.get_legend_handles_labels()[1]) == 2


@pytest.mark.parametrize("accepted", [[], [[0, 0, 0, 0, 0]]])
def test_answers_too_short_for_a_position_make_a_report_too(accepted, tmp_path):
    attended = [[0, 1]]
    one = sample("a", "signs", accepted, attended=attended, retrieved=[])
    BudgetResult([one], settings=SETTINGS).save(tmp_path)
    write_budget_report(tmp_path)
    text = (tmp_path / "budget.md").read_text()
    assert ("No answer about a picture was long enough" in text) == (not accepted)
    assert (tmp_path / "budget_preferred.png").is_file() == bool(accepted)
    assert not (tmp_path / "focus_movement.png").exists()


def test_the_report_can_be_made_again_from_its_folder(result, tmp_path):
    result.save(tmp_path)
    command = [sys.executable, "-m", "fovea.evaluation.budget_report"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "budget.md").is_file()
    missing = subprocess.run([*command, str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "holds no budget.json" in missing.stderr
