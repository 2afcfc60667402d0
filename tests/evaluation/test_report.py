"""Report, table and plots, from made-up traces whose figures are known."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fovea.decoding.selection import Selection
from fovea.decoding.trace import GenerationTrace, Round
from fovea.evaluation import plots
from fovea.evaluation.history import TrainingHistory
from fovea.evaluation.losslessness import Comparison
from fovea.evaluation.report import main, print_table, reported_evaluation, write_report
from fovea.evaluation.results import ALL, PromptResult, SpeedResult
from fovea.evaluation.style import save
from fovea.evaluation.table import interval_rows, markdown_table, plain_table, rows

SETTINGS = {
    "method": "fovea",
    "target": "qwen2_5_vl",
    "device": "cpu",
    "dtype": "float32",
    "max_new_tokens": 64,
    "tree": {"width": 2, "depth": 4, "nodes": 10},
    "retrieval": {"mode": "mass", "k_min": 4, "k_max": 32},
    "most_tokens_per_round": 6,
}


def prompt(key: str, source: str, accepted: list[int], *, transformers: bool = False) -> PromptResult:
    """A round takes 10 ms (3 draft, 6 verify), an autoregressive token 8 ms, either prefill 20 ms."""
    rounds = [Round(7, 5, a, a + 1, 0.003, 0.006, 0.010, [(4, 2), (9, 9)]) for a in accepted]
    tokens = list(range(1 + sum(a + 1 for a in accepted)))
    speculative = GenerationTrace(key, source, "fovea", 30, 16, tokens, "cap", 0.02, 0.02 + 0.01 * len(rounds), rounds)
    total = 0.02 + 0.008 * (len(tokens) - 1)
    baseline = GenerationTrace(key, source, "autoregressive", 30, 16, tokens, "cap", 0.02, total)
    reference = GenerationTrace(key, source, "transformers", 30, 16, tokens, "cap", 0.03, 2 * total)
    return PromptResult(speculative, baseline, Comparison(key, "exact"), reference if transformers else None)


@pytest.fixture
def result() -> SpeedResult:
    answers = [prompt("a", "captions", [5, 4, 3]), prompt("b", "captions", [2, 2]), prompt("c", "tables", [0, 0, 1])]
    return SpeedResult(answers, {"bad": "image 'bad.png' cannot be opened"}, SETTINGS)


@pytest.fixture
def run(result, tmp_path) -> Path:
    result.save(tmp_path / "evaluation" / "epoch_01")
    result.save(tmp_path / "evaluation" / "epoch_02")
    result.save(tmp_path / "evaluation" / "final")
    (tmp_path / "provenance.json").write_text(json.dumps({"commit": "abc123", "versions": {"torch": "2.9"}}))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.csv").write_text(
        "epoch,step,train/loss,train/loss_kl,train/top1_step_2,train/lr,val/loss,speed/tau\n"
        "0,9,4.0,2.0,0.5,0.1,,\n0,19,2.0,1.0,0.75,0.1,,\n0,19,,,,,3.0,\n0,19,,,,,,3.0\n"
    )
    return tmp_path


def read_table(text: str) -> list[list[str]]:
    """Cells of the first Markdown table in ``text``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert all(set(cell) <= set("-:") for cell in cells[1])
    return [cells[0], *cells[2:]]


def test_table_shows_the_pooled_figures(result):
    heading, captions, tables, pooled = rows(result.figures())
    assert heading == [
        "question family", "answers", "tau", "accepted drafts", "speedup", "exact, tied, unexplained",
        "mean of speedups", "decode speedup", "faster than AR",
    ]  # fmt: skip
    # captions: 21 tokens in 5 rounds; tables: 4 in 3.
    # a: 16 tokens in 50 ms beside 140 ms; b: 7 in 40 beside 68.
    mean = (0.14 / 0.05 + 0.068 / 0.04) / 2
    assert captions[:5] == ["captions", "2", "4.20", "3.20", f"{(0.04 + 0.168) / 0.09:.2f}x"]
    assert captions[5:] == ["2/0/0", f"{mean:.2f}x", "3.36x", "100%"]
    assert tables[1:4] == ["1", "1.33", "0.33"]
    assert pooled[:4] == [ALL, "3", f"{25 / 8:.2f}", f"{17 / 8:.2f}"]


def test_comparison_with_transformers_is_a_column_only_where_measured(result):
    assert "vs. HF generate" not in rows(result.figures())[0]
    beside = SpeedResult([*result.prompts, prompt("d", "tables", [1], transformers=True)], {}, SETTINGS)
    heading, captions, tables, pooled = rows(beside.figures())
    column = heading.index("vs. HF generate")
    assert captions[column] == "-"
    assert tables[column] == pooled[column] == f"{2 * 0.036 / 0.03:.2f}x"


def test_markdown_table_parses_and_the_console_shows_the_same(result):
    table = rows(result.figures())
    assert read_table(markdown_table(table)) == table
    console = Console(file=io.StringIO(), width=160)
    print_table(result, console)
    printed = console.file.getvalue()
    assert all(cell in printed for row in table for cell in row)
    assert "bonus token included" in printed


def test_report_holds_everything(run, result):
    write_report(run)
    text = (run / "report.md").read_text()
    assert read_table(text) == rows(result.figures())
    for piece in (
        "abc123",
        "bad.png",
        "3 equal the autoregressive ones",
        "tree.width",
        "evaluation/final/traces.jsonl",
    ):
        assert piece in text
    record = json.loads((run / "report.json").read_text())
    assert record["figures"] == result.figures()
    assert record["summary"] == result.summary()
    assert record["failed"] == result.failed
    assert record["provenance"]["commit"] == "abc123"
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2]
    assert record["figures"][ALL].keys() <= record["definitions"].keys()
    assert len(record["pictures"]) == 5
    for link in record["pictures"].values():
        assert f"({link})" in text
        picture = Image.open(run / link)
        assert min(picture.size) > 300
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10


def test_evidence_picture_is_shown_if_there_is_one(run):
    Image.new("RGB", (10, 10)).save(run / "evaluation" / "final" / "evidence.png")
    write_report(run)
    assert "(evaluation/final/evidence.png)" in (run / "report.md").read_text()


def test_confidence_intervals_stand_beside_the_figures(run, result):
    write_report(run)
    text = (run / "report.md").read_text()
    table = read_table(text[text.index("95 % intervals") :])
    assert table == interval_rows(result.figures())
    assert [row[0] for row in table[1:]] == ["captions", "tables", ALL]
    assert table[2][1:] == ["-"] * 6, "one answer has no interval"
    pooled = result.figures()[ALL]
    by_depth = read_table(text[text.index("Rounds with k or more accepted drafts:") :])
    assert [row[0] for row in by_depth[1:]] == ["1", "2", "3", "4", "5"]
    assert [row[1] for row in by_depth[1:]] == [f"{share:.1%}" for share in pooled["reach_rate"]]
    ends = pooled["intervals"]["reach_rate"][2]
    assert by_depth[3][2] == f"{ends[0]:.1%} to {ends[1]:.1%}"
    assert ends[0] <= pooled["reach_rate"][2] <= ends[1]
    low, high = pooled["intervals"]["tau"]
    assert table[3][1] == f"{low:.2f} to {high:.2f}"
    assert low < 25 / 8 < high
    for name in ("report.json", "evaluation/final/evaluation.json"):
        figures = json.loads((run / name).read_text())["figures"]
        assert figures[ALL]["intervals"]["tau"] == [low, high]
    console = Console(file=io.StringIO(), width=200)
    print_table(result, console)
    assert f"{low:.2f} to {high:.2f}" in console.file.getvalue()
    assert interval_rows(SpeedResult(result.prompts, {}, {**SETTINGS, "resamples": 0}).figures()) == []


def test_differences_are_listed(run):
    tie = prompt("tied", "captions", [1])
    tie = PromptResult(tie.speculative, tie.autoregressive, Comparison("tied", "tie", 2, 7, 8, 0.01, 0.02))
    SpeedResult([tie], {}, SETTINGS).save(run / "evaluation" / "final")
    write_report(run)
    text = (run / "report.md").read_text()
    assert "'tied': token 2 is 8 instead of 7" in text
    assert "1 leave them at a near-tie" in text


def test_the_selection_of_tokens_is_told(run, result):
    write_report(run)
    text = (run / "report.md").read_text()
    assert "batch 1, greedy)" in text
    assert "sampled" not in text
    selection = Selection({"temperature": 0.7, "top_p": 0.8}, True, seed=5, set_aside=("repetition_penalty",))
    SpeedResult(result.prompts, {}, {**SETTINGS, "selection": selection.describe()}).save(run / "evaluation" / "final")
    write_report(run)
    text = (run / "report.md").read_text()
    assert "batch 1, temperature 0.7, top_p 0.8)" in text
    assert "The answers are sampled." in text
    assert "3 equal the autoregressive ones token for token" in text
    for setting in ("selection.seed", "`['repetition_penalty']`"):
        assert setting in text


def test_an_unfinished_run_reports_its_last_epoch(run):
    for path in (run / "evaluation" / "final").iterdir():
        path.unlink()
    (run / "evaluation" / "final").rmdir()
    assert reported_evaluation(run).name == "epoch_02"
    write_report(run)
    assert json.loads((run / "report.json").read_text())["evaluation"] == "evaluation/epoch_02"


def test_command_makes_the_report_again(run):
    write_report(run)
    before = (run / "report.md").read_bytes()
    (run / "report.md").unlink()
    command = [sys.executable, "-m", "fovea.evaluation.report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (run / "report.md").read_bytes() == before
    assert "captions" in done.stdout


def test_command_says_what_it_needs(run, monkeypatch, capsys):
    for folder in ("plots", "metrics"):
        monkeypatch.setattr(sys, "argv", ["report", str(run / folder)])
        with pytest.raises(SystemExit, match="holds no speed evaluation"):
            main()
    monkeypatch.setattr(sys, "argv", ["report"])
    with pytest.raises(SystemExit):
        main()
    assert "usage: python -m fovea.evaluation.report" in capsys.readouterr().err


def test_history_reads_logged_losses_and_evaluations(run):
    history = TrainingHistory.read(run)
    assert history.losses == {"loss": ([9, 19], [4.0, 2.0]), "loss_kl": ([9, 19], [2.0, 1.0])}
    assert history.agreement == {"step_2": ([9, 19], [0.5, 0.75])}
    assert history.validation == ([19], [3.0])
    assert [(epoch, figures["tau"]) for epoch, figures in history.evaluations] == [(1, 25 / 8), (2, 25 / 8)]


def test_plots_show_the_numbers(result):
    figures = result.figures()
    acceptance = plots.acceptance_by_depth(figures[ALL]).axes[0]
    assert [bar.get_height() for bar in acceptance.patches] == figures[ALL]["reach_rate"]
    np.testing.assert_allclose(acceptance.lines[0].get_ydata(), figures[ALL]["conditional_rate"])
    tau, speedup = plots.speed_by_family(figures, 6).axes
    assert [bar.get_width() for bar in tau.patches] == [own["tau"] for own in figures.values()]
    assert [label.get_text() for label in tau.get_yticklabels()] == list(figures)
    assert len(speedup.patches) == 2 * len(figures)
    time = plots.round_time(figures).axes[0]
    widths = np.array([bar.get_width() for bar in time.patches]).reshape(3, len(figures))
    np.testing.assert_allclose(widths.T, [[3, 6, 1]] * len(figures))
    used = plots.retrieval_cardinality(result.speculative, (4, 32)).axes[0]
    counted = {round(bar.get_x() + 0.5): bar.get_height() for bar in used.patches[:-1] if bar.get_height()}
    assert counted == pytest.approx({4: 0.5, 9: 0.5})


def test_plots_of_a_rule_without_mass_and_of_a_single_family(tmp_path):
    alone = SpeedResult([prompt("a", "", [1])], {}, SETTINGS)
    for r in alone.prompts[0].speculative.rounds:
        r.retrieval = [(16, -1)] * 3
    figures = alone.figures()
    assert list(figures) == ["(no source)", ALL]
    axes = plots.retrieval_cardinality(alone.speculative).axes[0]
    assert min(bar.get_x() for bar in axes.patches) > 15
    for number, figure in enumerate([plots.speed_by_family(figures), plots.round_time(figures)]):
        assert min(Image.open(save(figure, tmp_path / f"{number}.png")).size) > 200


def test_a_narrow_terminal_breaks_headings_and_no_figure():
    table = [["method", *(["a rather long heading"] * 8)], ["eagle", *(["12.3456x"] * 8)]]
    out = io.StringIO()
    Console(width=80, file=out).print(plain_table(table, "title"))
    assert out.getvalue().count("12.3456x") == 8
