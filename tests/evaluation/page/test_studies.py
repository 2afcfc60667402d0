"""Which evaluations are a study, what its tables say, and where the page shows it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fovea.evaluation.budget_results import BudgetResult, BudgetSample
from fovea.evaluation.page.build import write_page
from fovea.evaluation.page.entries import Entry, find_entries
from fovea.evaluation.page.papers import published_tables
from fovea.evaluation.page.studies import Study, compared, find_studies
from fovea.evaluation.page.study_tables import difference, tables_of
from fovea.evaluation.results import SpeedResult
from tests.evaluation.page.made_up import CONFIG, SETTINGS, answers, job


def measured(
    folder: Path, typed: dict[str, Any] | None = None, *, better: int = 0, trained: Any = None, **more
) -> Path:
    """An evaluation of a FOVEA: settings typed for it, and those that it was ``trained`` with."""
    config: dict[str, Any] = deepcopy(CONFIG) | {"task": "evaluate", "seed": more.pop("seed", 42)}
    for name, value in {**(trained or {}), **(typed or {})}.items():
        node = config
        *path, last = name.split(".")
        for part in path:
            node = node[part]
        node[last] = value
    overrides = [f"{name}={value}" for name, value in (typed or {}).items()]
    return job(folder, better=better, overrides=overrides, config=config, **more)


def tree(width: int, depth: int, nodes: int) -> dict[str, Any]:
    return {"width": width, "depth": depth, "nodes": nodes, "count_root": True, "levels": "eagle"}


@pytest.fixture
def everything(tmp_path) -> Path:
    """What a whole collection holds, in miniature."""
    measured(tmp_path / "methods" / "fovea", better=1)
    job(tmp_path / "methods" / "pld", "pld")
    measured(tmp_path / "ablations" / "fovea", better=1)
    measured(tmp_path / "ablations" / "no_kl", trained={"objective.lambda_kl": 0.0})
    measured(tmp_path / "ablations" / "dense", trained={"drafter.retrieval.mode": "dense"})
    measured(tmp_path / "interfaces" / "fovea", {"drafter.interface": "fovea"}, better=1)
    measured(tmp_path / "interfaces" / "fixed", {"drafter.interface": "fixed_prefix"})
    measured(tmp_path / "controls" / "mass", better=1)
    measured(tmp_path / "controls" / "dense", {"drafter.retrieval.mode": "dense"}, better=2)
    for depth in (-1, 0, 1):
        measured(tmp_path / "depths" / str(depth), {"drafter.max_correction_depth": depth})
    for shape in ((1, 2, 3), (2, 6, 10)):
        measured(tmp_path / "trees" / f"{shape[2]}", tree=tree(*shape))
    job(tmp_path / "sampled" / "fovea", config=CONFIG, selection={"temperature": 1.0})
    budget = measured(tmp_path / "budgets" / "fovea", better=1) / "evaluation" / "final"
    settings = SETTINGS | {"ratios": [0, 0.25, 0.75, 1], "low": 0.25, "high": 0.75, "focus_tokens": 2}
    sample = BudgetSample("a", "captions", 9, 3, [[0, 1, 1, 2], [2, 2, 2, 2]], [[1, 2], [2, 3], [2, 3]], [[0], [1]])
    BudgetResult([sample], settings=settings).save(budget)
    online = measured(tmp_path / "epochs" / "fovea")
    for epoch in (1, 2):
        SpeedResult(answers(epoch), {}, SETTINGS).save(online / "evaluation" / f"epoch_0{epoch}")
    return tmp_path


@pytest.fixture
def entries(everything) -> list[Entry]:
    return find_entries([everything])[0]


@pytest.fixture
def studies(entries) -> dict[str, Study]:
    return {study.name: study for study in find_studies(entries)}


def test_evaluations_are_told_apart_by_their_settings(studies):
    names = {name: [row for row, _ in study.rows] for name, study in studies.items()}
    assert names == {
        "ablations": ["FOVEA", "without kl loss", "dense"],
        "interfaces": ["FOVEA", "fixed prefix"],
        "controls": ["FOVEA", "dense"],
        "depths": ["depth -1", "depth 0", "depth 1"],
        "trees": ["fovea, 1 x 2, 3 nodes", "fovea, 2 x 6, 10 nodes"],
        "sampled": ["fovea, temperature 1"],
        "budgets": ["fovea"],
        "epochs": ["fovea"],
    }


def test_the_comparison_holds_what_no_study_does(entries):
    assert [entry.job.parent.name for entry in compared(entries)] == ["methods", "methods"]
    alone = [entry for entry in entries if entry.job.parent.name == "interfaces"]
    assert compared(alone) == alone, "a sweep over one setting is still compared"
    without = [entry for entry in entries if entry.job.parent.name == "budgets"]
    assert compared(without) == without


def test_differences_are_to_the_whole_of_the_same_sweep(studies):
    by_name = {name: dict(study.rows) for name, study in studies.items()}
    (table,) = tables_of(studies["controls"])
    column = [name for name, _ in table.columns].index("Δ tau")
    assert [cells[column].text for _, cells in table.rows] == ["-", "+1.00"]
    expected = difference(by_name["controls"]["dense"], by_name["controls"]["FOVEA"])
    assert expected is not None
    assert table.rows[1][1][column].value == expected[0] == 1.0
    assert table.rows[1][1][column].interval == "+1.00 to +1.00", "the same change on every prompt is certain"
    (ablations,) = tables_of(studies["ablations"])
    column = [name for name, _ in ablations.columns].index("Δ tau")
    assert ablations.rows[1][1][column].text == "-1.00"


def test_seeds_are_compared_with_their_own(tmp_path):
    for seed in (1, 2):
        measured(tmp_path / f"fovea{seed}", better=seed, seed=seed)
        measured(tmp_path / f"gate{seed}", trained={"drafter.use_gate": False}, seed=seed)
    (study,) = find_studies(find_entries([tmp_path])[0])
    assert [name for name, _ in study.rows] == [
        *("FOVEA, seed 1", "FOVEA, seed 2", "without correction gate, seed 1", "without correction gate, seed 2"),
    ]
    (table,) = tables_of(study)
    column = [name for name, _ in table.columns].index("Δ tau")
    assert [cells[column].text for _, cells in table.rows] == ["-", "-", "-1.00", "-2.00"]


def test_budgets_and_focus_have_their_figures(studies):
    budgets, focus = tables_of(studies["budgets"])
    own = dict(zip((name for name, _ in budgets.columns), budgets.rows[0][1], strict=True))
    assert (own["states"].text, own["prefer 0%"].text, own["prefer 100%"].text) == ("2", "50.0%", "50.0%")
    assert (own["accepted at 25%"].text, own["accepted at 100%"].text) == ("1.50", "2.00")
    assert [name for name, _ in focus.rows] == ["fovea: what the target attends to", "fovea: what the roots retrieve"]
    attended = dict(zip((name for name, _ in focus.columns), focus.rows[0][1], strict=True))
    assert (attended["pairs"].text, attended["distance"].text) == ("2", "0.333")


def test_epochs_have_theirs(studies, entries):
    (table,) = tables_of(studies["epochs"])
    entry = studies["epochs"].entries[0]
    taus = [figures["tau"] for _, figures in entry.history.evaluations]
    assert [cell.text for cell in table.rows[0][1]] == [f"{tau:.2f}" for tau in taus]


def test_the_papers_tables_take_each_row_from_its_study(entries):
    tables = {table.source: table for table in published_tables(entries)}
    by_place = {(entry.job.parent.name, entry.job.name): entry for entry in entries}

    def here(source: str, row: str) -> dict[str, str]:
        table = tables[source]
        cells = next(cells for cells in table.rows if cells[0] == row)
        return dict(zip([*table.heading, *table.here], cells, strict=True))

    def tau(*place: str) -> str:
        return f"{by_place[place].pooled['tau']:.2f}"

    def both(*place: str) -> str:
        return f"{by_place[place].pooled['speedup']:.2f}x / {tau(*place)}"

    target = "here: a target"
    assert here("FOVEA, Table 3", "fovea correction")[f"tau {target}"] == tau("interfaces", "fovea")
    assert here("FOVEA, Table 2", "full")[target] == both("ablations", "fovea")
    assert here("FOVEA, Table 2", "without visual correction")[target] == "", "switched off, not trained without"
    assert here("FOVEA, Table 7", "dense")[f"Δ {target}"].endswith(" / +1.00"), "of one checkpoint"
    assert here("FOVEA, Figure 6", "0")[f"tau {target}"] == tau("depths", "0")
    assert here("FOVEA, Table 1", "FOVEA")[target] == both("methods", "fovea")
    assert {table.study for table in tables.values()} == {
        *("", "ablations", "interfaces", "controls", "depths", "budgets", "epochs", "branches"),
    }


def test_branches_of_the_compressor_have_their_table_and_are_no_specvlm(tmp_path):
    def compression(mode: str, **more: int) -> dict[str, Any]:
        whole = {"mode": mode, "prune_ratio": 20, "pool_ratio": 20, "conv_ratio": 3, "queries": 2}
        return {"task": "evaluate", "drafter": {"compression": whole | more}}

    job(tmp_path / "whole", "specvlm", better=2, config=compression("select"))
    job(tmp_path / "conv_10", "specvlm", config=compression("conv", conv_ratio=10))
    job(tmp_path / "resampler_1", "specvlm", config=compression("resampler", queries=1))
    job(tmp_path / "prune_20", "specvlm", better=1, config=compression("prune"))
    entries = find_entries([tmp_path])[0]
    (study,) = find_studies(entries)
    assert [name for name, _ in study.rows] == ["prune, 20x", "conv, 10x", "resampler, 1 query"]
    assert [entry.job.name for entry in compared(entries)] == ["whole"]
    tables = {table.name: table for table in published_tables(entries)}
    rows = {row[0]: row[1:] for row in tables["specvlm_table4"].rows}
    taus = {entry.job.name: f"{entry.pooled['tau']:.2f}" for entry in entries}
    assert rows["prune, 20x"][:2] == ["2.03x", "3.40"]
    assert (rows["prune, 20x"][3], rows["prune, 2x"][3]) == (taus["prune_20"], "")
    assert rows["conv, 10x"] == ["1.91x", "3.29", rows["conv, 10x"][2], taus["conv_10"]]
    assert rows["resampler, 1 query"][3] == taus["resampler_1"]
    assert len(rows) == 20
    of_select = next(row for row in tables["specvlm_table3"].rows if "select" in row[0].lower())
    assert of_select[-1].endswith(f" / {taus['whole']}")


def test_budgets_on_ocrbench_stand_in_the_papers_rows_of_it(tmp_path):
    settings = SETTINGS | {"ratios": [0.0, 0.25, 0.75, 1.0], "low": 0.25, "high": 0.75, "focus_tokens": 2}
    # Early and late: the best budget 100 % with a range of 2 drafts, then none with a range of 0.
    sample = BudgetSample("a", "captions", 9, 3, [[0, 1, 1, 2], [2, 2, 2, 2]], [], [])
    for name in ("ocrbench", "heldout"):
        folder = measured(tmp_path / name, benchmark=name)
        shown = sample if name == "ocrbench" else BudgetSample("a", "", 9, 3, [[1, 1, 1, 1]] * 2, [], [])
        BudgetResult([shown], settings=settings).save(folder / "evaluation" / "final")
    table = next(t for t in published_tables(find_entries([tmp_path])[0]) if t.name == "fovea_budgets")
    assert table.here == ["here: heldout, a target", "here: ocrbench, a target"]
    here = {row[0]: row[1:] for row in table.rows}
    assert here["ocrbench early mean preferred budget"] == ["0.15", "", "1.000"]
    assert here["ocrbench late mean preferred budget"] == ["0.237", "", "0.000"]
    assert here["ocrbench early mean range"] == ["0.699", "", "2.000"]
    assert here["ocrbench late sensitive"] == ["0.488", "", "0.000"]
    assert here["states"][1:] == ["2", "2"]


def test_every_study_is_a_section_with_its_papers_tables(everything, entries):
    text = write_page(entries, everything / "page.html")[0].read_text(encoding="utf-8")
    for study, source in (
        *(("ablations", "FOVEA, Table 2"), ("interfaces", "FOVEA, Table 3"), ("controls", "FOVEA, Table 7")),
        *(("depths", "FOVEA, Figure 6"), ("budgets", "FOVEA, Appendix A"), ("epochs", "SpecVLM, Table 7")),
        *(("trees", ""), ("sampled", "")),
    ):
        section = text[text.index(f'<section id="{study}">') :]
        section = section[: section.index("</section>")]
        assert source in section
        assert f'href="#{study}"' in text
        assert "<svg" in section
        assert text.count(f'<span class="source">{source}') <= 1 or not source, "nowhere twice"
    rest = text[text.index('<section id="published">') :]
    assert "FOVEA, Table 1" in rest
    assert "FOVEA, Table 7" not in rest
    assert "Every evaluation" in rest
