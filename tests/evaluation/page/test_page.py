"""The page and the tables beside it, read back with an HTML parser: every figure is there, and nothing from outside."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from fovea.evaluation.page import charts, comparison
from fovea.evaluation.page.build import write_page
from fovea.evaluation.page.entries import find_entries
from fovea.evaluation.page.svg import inline_svg
from fovea.evaluation.report import main, print_table
from fovea.evaluation.results import DEFINITIONS, SpeedResult
from fovea.evaluation.style import TOLD
from tests.evaluation.page.made_up import SETTINGS, answer, answers, job, keep_trajectories

#: Elements that have no end tag.
VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements with their attributes and the text in them; complains about what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open[-1:]:
            self.scripts[-1] += data
        elif {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data if "small" not in self.open else f" [{data}]"


@pytest.fixture
def folder(tmp_path) -> Path:
    run = job(tmp_path / "run", better=1)
    for epoch in (1, 2):
        job(run, evaluation=f"epoch_0{epoch}")
    keep_trajectories(run / "evaluation" / "final")
    job(tmp_path / "pld", "a_b%<i>", drafter_parameters=0)
    return tmp_path


@pytest.fixture
def page(folder) -> Page:
    entries, without = find_entries([folder])
    write_page(entries, folder / "out" / "page.html", {**without, "broken": "failed: <why>"})
    return Page((folder / "out" / "page.html").read_text(encoding="utf-8"))


def test_the_comparison_shows_every_figure_with_its_definition(page, folder):
    entries, _ = find_entries([folder])
    best = next(entry for entry in entries if entry.method == "fovea")
    heading, *rows = page.tables[0]
    assert heading == ["method", *(measure.name for measure in comparison.measures_of(entries))]
    assert "training" not in heading, "nobody noted it"
    assert [row[0].strip() for row in rows] == ["fovea", "a_b%<i>"], "the longest accept length first"
    heading_of_times, *times = page.tables[1]
    shares = dict(zip(heading_of_times, (cell.strip() for cell in times[0]), strict=True))
    low, high = best.pooled["intervals"]["prefill_share"]
    assert shares["prefill"] == f"{best.pooled['time_share']['prefill']:.0%} [{low:.0%}\N{EN DASH}{high:.0%}]"
    assert (shares["draft ms"], shares["verify ms"], shares["rest ms"]) == ("3.00", "6.00", "1.00")
    assert "peak memory over AR" not in shares, "a CPU keeps no count"
    own = dict(zip(heading, (cell.strip() for cell in rows[0]), strict=True))
    low, high = best.pooled["intervals"]["tau"]
    assert own["tau"] == f"{best.pooled['tau']:.2f} [{low:.2f}\N{EN DASH}{high:.2f}]"
    assert own["draft share"] == "30%"
    assert [own[name] for name in ("exact", "tie-explained", "unexplained")] == ["3", "0", "0"]
    assert heading[heading.index("speedup") + 1] == "exact", "beside the speedup"
    assert own["parameters"] == "1.50M"
    assert dict(zip(heading, rows[1], strict=True))["parameters"] == "-"
    titles = [attributes.get("title") for tag, attributes in page.elements if tag == "th"]
    assert DEFINITIONS["tau"] in titles


def test_nothing_comes_from_outside_and_ids_are_distinct(page, folder):
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("#", "data:")), (tag, name, value)
    text = (folder / "out" / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r"url\(#([^)]+)\)", text) + [
        (a.get("xlink:href") or "#")[1:] for t, a in page.elements if t == "use"
    ]
    assert set(used) <= set(ids)
    assert "failed: &lt;why&gt;" in text
    assert "<i>" not in text.replace("&lt;i&gt;", "")


def test_all_the_plots_with_data_are_there(page):
    plots = [attributes["id"] for tag, attributes in page.elements if tag == "figure" and "id" in attributes]
    names = "speed-against-tau", "acceptance-by-depth", "tau-by-family", "round-time", "cardinalities", "training"
    assert plots == [f"plot-{name}" for name in names]


def test_the_viewer_gets_what_was_kept(page, folder):
    kept = [json.loads(line) for line in (folder / "run/evaluation/final/trajectories.jsonl").read_text().splitlines()]
    data = json.loads(page.scripts[0])
    assert [entry["label"] for entry in data["entries"]] == ["fovea"]
    shown = data["entries"][0]["trajectories"]
    assert [one["question"] for one in shown] == [one["question"] for one in kept]
    assert shown[0]["rounds"][0]["evidence"] == kept[0]["rounds"][0]["evidence"]
    assert shown[0]["pictures"] == [0]
    assert data["pictures"][0]["data"].startswith("data:image/png;base64,")
    assert (data["pictures"][0]["width"], data["pictures"][0]["height"]) == (60, 40)


def test_without_kept_answers_there_is_no_viewer(tmp_path):
    entries, _ = find_entries([job(tmp_path / "run")])
    (page, *_) = write_page(entries, tmp_path / "page.html")
    parsed = Page(page.read_text(encoding="utf-8"))
    assert "viewer" not in [attributes.get("id") for _, attributes in parsed.elements]
    assert len(parsed.scripts) == 1


def test_tables_beside_the_page_hold_the_same(page, folder):
    entries, _ = find_entries([folder])
    best = next(entry for entry in entries if entry.method == "fovea")
    rows = list(csv.DictReader(io.StringIO((folder / "out" / "page.csv").read_text())))
    assert float(rows[0]["tau"]) == best.pooled["tau"]
    assert [float(rows[0][f"tau {end}"]) for end in ("low", "high")] == best.pooled["intervals"]["tau"]
    assert rows[0]["commit"] == "0123456789abcdef"
    assert rows[0]["folder"] == f"{folder.name}/run/evaluation/final"
    written = [(folder / "out" / f"page{suffix}").read_text(encoding="utf-8") for suffix in (".html", ".csv", ".md")]
    assert not [text for text in written if str(folder) in text], "a page tells no folder of the machine"
    assert rows[1]["parameters"] == ""
    markdown = (folder / "out" / "page.md").read_text()
    assert f"{best.pooled['speedup']:.2f}x" in markdown
    assert f"**tau**: {DEFINITIONS['tau']}." in markdown
    latex = (folder / "out" / "page.tex").read_text()
    assert "a\\_b\\%<i> &" in latex
    body = latex[latex.index("\\midrule") : latex.index("\\bottomrule")]
    assert {line.count(" & ") for line in body.splitlines()[1:]} == {len(comparison.measures_of(entries))}


def test_every_other_table_lies_in_a_folder_in_three_formats(page, folder):
    tables = folder / "out" / "page_tables"
    names = {path.stem for path in tables.iterdir()}
    assert {path.name for path in tables.iterdir()} == {f"{n}{s}" for n in names for s in (".md", ".tex", ".csv")}
    assert names >= {"times", "study_epochs", "fovea_table2", "fovea_table3", "fovea_table7", "fovea_figure6"}
    assert names >= {f"specvlm_table{number}" for number in range(1, 8)}
    assert {n for n in names if n.startswith("fovea_table1")} == {
        *("fovea_table1_llava-next-7b", "fovea_table1_llava-next-13b", "fovea_table1_qwen2.5-vl-7b"),
    }
    best = next(entry for entry in find_entries([folder])[0] if entry.method == "fovea").pooled
    rows = {row["method"]: row for row in csv.DictReader((tables / "fovea_table1_llava-next-7b.csv").open())}
    own = f"{best['speedup']:.2f}x / {best['tau']:.2f}"
    assert (rows["FOVEA"]["here: a target"], rows["FOVEA"]["Avg"]) == (own, "1.68x / 3.96")
    times = next(csv.DictReader((tables / "times.csv").open()))
    assert float(times["prefill"]) == best["time_share"]["prefill"]
    assert float(times["prefill high"]) == best["intervals"]["prefill_share"][1]
    markdown = (tables / "fovea_table7.md").read_text()
    assert "# Retrieval controls" in markdown
    assert "- FOVEA, Table 7. Difference to FOVEA" in markdown
    latex = (tables / "fovea_table7.tex").read_text()
    assert {line.count(" & ") for line in latex.splitlines() if line.endswith("\\\\")} == {4}, (
        "no control, none of ours"
    )
    latex = (tables / "fovea_table3.tex").read_text()
    assert "draft ms here: a target &" in latex
    assert {line.count(" & ") for line in latex.splitlines() if line.endswith("\\\\")} == {8}
    assert "<code>page_tables/</code>" in (folder / "out" / "page.html").read_text()
    (tables / "study_of_another_page.csv").write_text("x")
    write_page(find_entries([folder / "pld"])[0], folder / "out" / "page.html")
    assert {path.stem for path in tables.iterdir()} == names - {"study_epochs"}, "what the page has no longer"


def test_prompts_that_could_not_be_read_are_counted_and_named(tmp_path):
    run = job(tmp_path / "run")
    failed = {"bad#1": "/home/me/bad.png cannot be opened", "<worse>": "nor this"}
    SpeedResult(answers(), failed, SETTINGS).save(run / "evaluation" / "final")
    (path, *_) = write_page(find_entries([run])[0], tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    words = "fovea: 2 prompts could not be read, and are in no figure: <code>bad#1</code>, <code>&lt;worse&gt;</code>."
    assert words in text
    assert "/home/me" not in text
    heading, row = Page(text).tables[0]
    assert dict(zip(heading, row, strict=True))["not read"] == "2"
    console = Console(file=io.StringIO(), width=120)
    print_table(SpeedResult.load(run / "evaluation" / "final"), console)
    printed = console.file.getvalue()
    assert "Prompts that could not be read, and are in no figure: 2. bad#1, <worse>" in printed


def test_a_measurement_with_an_unexplained_answer_or_of_a_failed_job_is_warned_of(tmp_path):
    job(tmp_path / "good", "pld", outcomes=("exact", "tie", "exact"))
    job(tmp_path / "bad", better=2, outcomes=("exact", "unexplained", "tie"), ended="failed: 1 of 3 differ")
    job(tmp_path / "full", "dream", better=1, ended="failed: no room")
    job(tmp_path / "under_way", "msd", ended="interrupted")
    (path, *_) = write_page(find_entries([tmp_path])[0], tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    head = unescape(text[text.index("<header>") : text.index("<nav")])
    assert "fovea is not lossless here: 1 of 3 answers differs from the target's own and nothing explains it" in head
    assert "first 'b': token 1 is 5 instead of 4, unexplained" in head
    assert "dream: the job has failed: no room" in head
    assert head.count('class="warn"') == 2, "a job that writes its own page is under way"
    assert "fovea," not in head[head.index("lead") :], "what is not lossless is not the best"
    assert "2 leave them at a near-tie" in head
    assert "and 1 differs without an explanation" in head
    heading, *rows = Page(text).tables[0]
    (bad,) = (dict(zip(heading, row, strict=True)) for row in rows if row[0].strip() == "fovea")
    assert [bad[name].strip() for name in ("exact", "tie-explained", "unexplained")] == ["1", "1", "1"]
    assert "- **Warning**: fovea is not lossless here" in path.with_suffix(".md").read_text()
    assert "% Warning: fovea is not lossless here" in path.with_suffix(".tex").read_text()
    write_page(find_entries([tmp_path / "bad"])[0], tmp_path / "page.html")
    assert "No measurement here is sound" in path.read_text(encoding="utf-8")


def test_the_page_names_the_checkpoint_it_was_measured_on(tmp_path):
    known = {"target_name": "Qwen/Qwen2.5-VL-3B-Instruct", "target_revision": "66285546d2b8" + 28 * "0"}
    job(tmp_path / "new", target="Qwen2_5_VLForConditionalGeneration", target_weights="ab" * 32, **known)
    job(tmp_path / "old", "pld", config={"model": {"path": "/home/me/some-7b", "hub_id": "x/y", "name": "z"}})
    (tmp_path / "old" / "provenance.json").write_text(json.dumps({"fingerprints": {"target": "cd" * 32}}))
    entries, _ = find_entries([tmp_path])
    name, words = comparison.conditions(entries)[0]
    assert name == "target"
    assert (
        "Qwen/Qwen2.5-VL-3B-Instruct (Qwen2_5_VLForConditionalGeneration, revision 66285546d2b8, weights abababababab)"
    ) in words
    assert "some-7b (a target, weights cdcdcdcdcdcd)" in words, "a folder of before: by what its job has kept"
    (path, *_) = write_page(entries, tmp_path / "page.html")
    assert words in path.read_text(encoding="utf-8")
    assert "/home/me" not in path.read_text(encoding="utf-8")


def test_the_command_writes_the_report_of_a_single_run_too(folder, monkeypatch, capsys):
    command = [sys.executable, "-m", "fovea.evaluation.report", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("report.md", "page.html", "page.md", "page.tex", "page.csv"):
        assert str(folder / "run" / name) in done.stdout
        assert (folder / "run" / name).stat().st_size > 0
    out = folder / "elsewhere" / "all.html"
    monkeypatch.setattr(sys, "argv", ["report", str(folder / "run"), str(folder / "pld"), "--out", str(out)])
    main()
    assert out.with_suffix(".csv").is_file()
    assert not (folder / "pld" / "report.md").exists()


@pytest.mark.parametrize("name", ["all.csv", "all.md", "all"])
def test_a_page_that_its_own_tables_would_replace_is_refused(folder, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["report", str(folder / "run"), "--out", str(folder / name)])
    with pytest.raises(SystemExit):
        main()
    assert f"{name} is not the name of a page; give one that ends in .html" in capsys.readouterr().err
    assert not (folder / name).exists()


def test_figures_become_svg_with_the_pages_colours(folder):
    entries, _ = find_entries([folder])
    drawn = [inline_svg(charts.speed_against_tau(entries), "x", 'a "plot"') for _ in range(2)]
    assert drawn[0] == drawn[1]
    best = next(entry for entry in entries if entry.method == "fovea").pooled
    assert f"<title>fovea: tau {best['tau']:.2f}, speedup {best['speedup']:.2f}x</title>" in drawn[0]
    assert "<title>a_b%&lt;i&gt;: tau" in drawn[0]
    assert TOLD not in drawn[0]
    root = ElementTree.fromstring(drawn[0])
    assert root.get("aria-label") == 'a "plot"'
    assert root.get("viewBox")
    assert all(e.get("id").startswith("x-") for e in root.iter() if e.get("id"))
    assert "var(--ink)" in drawn[0]
    assert "#0072b2" not in drawn[0]
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
    assert any(text.startswith("fovea") for text in texts)


def test_cardinalities_by_place_in_the_answer():
    prompt = answer("a", "", [1] * 21)
    for number, one in enumerate(prompt.speculative.rounds):
        one.retrieval = [(number, -1)]
    alone = answer("b", "", [1], [(99, -1)])
    bins = charts.binned_cardinalities([prompt.speculative, alone.speculative])
    assert [own.tolist() for own in bins[:2]] == [[0, 1], [2, 3]]
    assert bins[-1].tolist() == [18, 19, 20]
    assert len(answers()) == 3


def test_labels_do_not_lie_on_each_other():
    values = np.array([1.0, 1.01, 1.02, 1.9, 1.91])
    places = charts._apart(values, 0.0, 2.0, 0.1)
    assert np.diff(places).min() >= 0.2 - 1e-9
    assert places.max() <= 2.0
    np.testing.assert_array_equal(charts._apart(np.array([0.5, 1.5]), 0.0, 2.0, 0.1), [0.5, 1.5])
