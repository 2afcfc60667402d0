"""The papers' tables: their figures stand where they should, and ours in the row that they belong to."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fovea.app.launch import CONFIG_DIR
from fovea.evaluation.page.belonging import FULL, METHODS, VARIANTS, variant_of
from fovea.evaluation.page.entries import Entry, find_entries
from fovea.evaluation.page.papers import published_tables
from fovea.evaluation.page.published_table import read
from fovea.evaluation.results import SpeedResult
from tests.evaluation.page.made_up import CONFIG, job


def changed(name: str, value) -> dict:
    config = deepcopy(CONFIG)
    node = config
    *path, last = name.split(".")
    for part in path:
        node = node[part]
    node[last] = value
    return config


def table(entries, source: str, title: str = ""):
    return next(t for t in published_tables(entries) if t.source == source and title in t.title)


def row(one, name: str) -> dict[str, str]:
    cells = next(cells for cells in one.rows if cells[0] == name)
    return dict(zip([*one.heading, *one.here], cells, strict=True))


@pytest.fixture
def entries(tmp_path):
    job(tmp_path / "full", better=2)
    job(tmp_path / "gate", overrides=["drafter.use_gate=false"], config=changed("drafter.use_gate", False))
    job(tmp_path / "dense", overrides=["a=1"], better=1, config=changed("drafter.retrieval.mode", "dense"))
    job(tmp_path / "pld", "pld")
    job(tmp_path / "concat", "specvlm_concat", better=1)
    return find_entries([tmp_path])[0]


def test_figures_of_the_papers_are_where_they_belong(entries):
    one = row(table(entries, "FOVEA, Table 1", "LLaVA-Next-7B"), "FOVEA")
    assert (one["MMT"], one["Avg"]) == ("2.13x", "1.68x / 3.96")
    assert row(table(entries, "FOVEA, Table 2"), "without kl loss")["OCRBench"] == "0.97x / 2.12"
    assert row(table(entries, "FOVEA, Table 3"), "fovea correction")["draft ms"] == "16.49"
    assert row(table(entries, "FOVEA, Table 7"), "dense")["Macro"] == "-0.157 ± 0.048 / -0.193 ± 0.0"
    assert row(table(entries, "SpecVLM, Table 3"), "select")["VQAv2"] == "2.07x / 4.19"
    epochs = row(table(entries, "SpecVLM, Table 7"), "SpecVLM, LLaVA-1.6-13B")
    assert epochs["epoch 5"] == "2.82x / 5.34"
    assert "OCRBench" in table(entries, "FOVEA, Table 1").heading


def test_ours_stand_in_the_row_of_their_method(entries):
    by_label = {entry.label: entry for entry in entries}
    methods = table(entries, "FOVEA, Table 1", "Qwen")
    assert row(methods, "FOVEA")["tau here"] == f"{by_label['fovea'].pooled['tau']:.2f}", "changed ones not"
    assert row(methods, "PLD")["speedup here"] == f"{by_label['pld'].pooled['speedup']:.2f}x"
    assert row(methods, "EAGLE-3")["tau here"] == row(methods, "AR Baseline")["tau here"] == ""
    ablation = table(entries, "FOVEA, Table 2")
    gate = next(entry for entry in entries if variant_of(entry) == "without_correction_gate")
    assert row(ablation, "without correction gate")["tau here"] == f"{gate.pooled['tau']:.2f}"
    assert row(ablation, "without depth embedding")["tau here"] == ""
    assert ablation.filled
    assert not table(entries, "FOVEA, Figure 6").filled
    assert row(table(entries, "FOVEA, Table 7"), "dense")["Δ tau here"] == "-1.00"
    assert row(table(entries, "SpecVLM, Table 3"), "concat")["tau here"] != ""
    assert row(table(entries, "SpecVLM, Table 3"), "weight")["tau here"] == ""


def test_several_of_a_method_give_a_range(tmp_path):
    for number in range(3):
        job(tmp_path / str(number), better=number, overrides=[f"decode.tree.nodes={number}"])
    entries, _ = find_entries([tmp_path])
    taus = sorted(entry.pooled["tau"] for entry in entries)
    own = row(table(entries, "FOVEA, Table 1"), "FOVEA")["tau here"]
    assert own == f"{taus[0]:.2f} to {taus[-1]:.2f} (3)"


def entry_of(experiment: str, method: str = "fovea") -> Entry:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("train", overrides=[f"experiment={experiment}", "paths.output_dir=/run"])
    config = OmegaConf.to_container(cfg, resolve=False)
    return Entry("x", CONFIG_DIR, CONFIG_DIR, SpeedResult([], {}, {"method": method}), {}, config, {})


@pytest.mark.parametrize(
    ("experiment", "variant"),
    [
        ("fovea", FULL),
        ("ablation/no_correction", "without_visual_correction"),
        ("ablation/no_depth_embedding", "without_depth_embedding"),
        ("ablation/no_gate", "without_correction_gate"),
        ("ablation/no_hid", "without_hidden_loss"),
        ("ablation/no_kl", "without_kl_loss"),
        ("ablation/no_margin", "without_boundary_margin"),
        ("ablation/fixed_prefix", "fixed_prefix"),
        ("ablation/dynamic_insertion", "dynamic_insertion"),
        ("ablation/correction_rebuild", "correction_rebuild"),
        ("ablation/random_16", "random_top16"),
        ("ablation/static_image_16", "static_image_top16"),
        ("ablation/query_agnostic_16", "query_agnostic_top16"),
        ("ablation/state_only_16", "state_only_top16"),
        ("ablation/dense", "dense"),
    ],
)
def test_every_ablation_belongs_to_its_row(experiment, variant):
    assert variant_of(entry_of(experiment)) == variant


def test_several_changes_at_once_and_other_methods_are_no_variant():
    both = entry_of("ablation/no_gate")
    both.config["objective"]["lambda_kl"] = 0.0
    assert variant_of(both) is None
    assert variant_of(entry_of("eaglevlm", "eaglevlm")) is None


def test_every_name_that_is_mapped_is_in_a_paper():
    methods = {r["method"] for name in ("fovea_table1", "specvlm_tables") for r in read(name)}
    methods |= {r["configuration"] for r in read("specvlm_table3_compressor")}
    assert set(METHODS) <= methods
    assert {path.stem for path in (CONFIG_DIR / "method").glob("*.yaml")} >= set(METHODS.values())
    variants = {
        r["variant"] for name in ("fovea_table2_ablation", "fovea_table7_retrieval_controls") for r in read(name)
    }
    variants |= {r["interface"] for r in read("fovea_table3_cache")} - {"fovea_correction"}
    assert variants - {FULL} <= set(VARIANTS)
