"""The papers' tables: their figures stand where they should, and ours in the row that they belong to."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fovea.app.launch import CONFIG_DIR
from fovea.evaluation.page.belonging import FULL, METHODS, VARIANTS, variant_of
from fovea.evaluation.page.entries import Entry, find_entries
from fovea.evaluation.page.papers import published_tables
from fovea.evaluation.page.places import BENCHMARKS, TARGETS
from fovea.evaluation.page.published_table import read
from fovea.evaluation.results import SpeedResult
from tests.evaluation.page.made_up import CONFIG, answer, job


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


def shown(entry: Entry) -> str:
    """Speedup and tau as a cell has them."""
    return f"{entry.pooled['speedup']:.2f}x / {entry.pooled['tau']:.2f}"


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
    assert row(methods, "FOVEA")["here: a target"] == shown(by_label["fovea"]), "changed ones not"
    assert row(methods, "PLD")["here: a target"] == shown(by_label["pld"])
    assert row(methods, "EAGLE-3")["here: a target"] == row(methods, "AR Baseline")["here: a target"] == ""
    ablation = table(entries, "FOVEA, Table 2")
    gate = next(entry for entry in entries if variant_of(entry) == "without_correction_gate")
    assert row(ablation, "without correction gate")["here: a target"] == shown(gate)
    assert row(ablation, "without depth embedding")["here: a target"] == ""
    assert ablation.filled
    assert not table(entries, "FOVEA, Figure 6").filled
    assert row(table(entries, "FOVEA, Table 7"), "dense")["Δ here: a target"].endswith(" / -1.00")
    assert row(table(entries, "SpecVLM, Table 3"), "concat")["here: a target"] != ""
    assert row(table(entries, "SpecVLM, Table 3"), "weight")["here: a target"] == ""


def test_several_of_a_method_give_a_range(tmp_path):
    for number in range(3):
        job(tmp_path / str(number), better=number, overrides=[f"decode.tree.nodes={number}"])
    entries, _ = find_entries([tmp_path])
    taus = sorted(entry.pooled["tau"] for entry in entries)
    own = row(table(entries, "FOVEA, Table 1"), "FOVEA")["here: a target"]
    assert own.endswith(f" / {taus[0]:.2f} to {taus[-1]:.2f} (3)")


def test_ours_stand_beside_the_column_of_their_benchmark_and_name_their_target(tmp_path):
    qwen, small = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
    job(tmp_path / "a", target_name=qwen, benchmark="ocrbench")
    job(tmp_path / "b", target_name=small, benchmark="ocrbench", better=1)
    job(tmp_path / "c", target_name=small, benchmark="seed_bench_2", better=2)
    job(tmp_path / "d", target_name=small, benchmark="heldout", better=3)
    entries = {(entry.target, entry.benchmark): entry for entry in find_entries([tmp_path])[0]}
    own = table(entries.values(), "FOVEA, Table 1", "Qwen")
    heading = own.beside[0]
    assert heading[:2] == ["method", f"here: heldout, {small}"], "what the paper has no column of goes first"
    at = heading.index("OCRBench")
    assert sorted(heading[at + 1 : at + 3]) == [f"here: OCRBench, {small}", f"here: OCRBench, {qwen}"]
    assert heading[heading.index("SEED") + 1] == f"here: SEED, {small}"
    cells = dict(zip(heading, next(line for line in own.beside if line[0] == "FOVEA"), strict=True))
    assert cells[f"here: OCRBench, {qwen}"] == shown(entries[qwen, "ocrbench"])
    assert cells[f"here: OCRBench, {small}"] == shown(entries[small, "ocrbench"])
    assert cells[f"here: SEED, {small}"] == shown(entries[small, "seed_bench_2"])
    of_llava = table(entries.values(), "FOVEA, Table 1", "LLaVA-Next-7B").here
    assert f"here: OCRBench, {qwen}" not in of_llava, "it has a table of its own"
    assert f"here: OCRBench, {small}" in of_llava


def test_what_is_not_lossless_is_marked_in_every_table(tmp_path):
    job(tmp_path / "run", outcomes=("exact", "unexplained", "tie"))
    job(tmp_path / "pld", "pld", outcomes=("exact", "tie", "tie"))
    entries = find_entries([tmp_path])[0]
    by_method = {entry.method: entry for entry in entries}
    methods = table(entries, "FOVEA, Table 1")
    assert row(methods, "FOVEA")["here: a target"] == f"{shown(by_method['fovea'])}, not lossless"
    assert row(methods, "PLD")["here: a target"] == shown(by_method["pld"])
    speedup = row(table(entries, "FOVEA, Table 3"), "fovea correction")["speedup here: a target"]
    assert speedup.endswith("x, not lossless")


def test_subjects_of_mmmu_stand_beside_their_columns(tmp_path):
    folder = job(tmp_path / "run", "specvlm", benchmark="mmmu", target_name="llava-hf/llava-1.5-7b-hf")
    found = [answer("a", "mmmu/Art", [3]), answer("b", "mmmu/Math", [1])]
    SpeedResult(found, {}, SpeedResult.load(folder / "evaluation" / "final").settings).save(
        folder / "evaluation" / "final"
    )
    own = table(find_entries([folder])[0], "SpecVLM, Table 2")
    assert own.here == ["here: Art, llava-hf/llava-1.5-7b-hf", "here: Math, llava-hf/llava-1.5-7b-hf"]
    assert row(own, "SpecVLM, LVA1.5-7B")[own.here[0]].endswith(" / 4.00")
    assert row(own, "SpecVLM, LVA1.5-7B")[own.here[1]].endswith(" / 2.00")
    assert row(own, "SpecVLM, LVA1.6-7B")[own.here[0]] == "", "another target's row"


def test_every_name_of_a_place_is_in_a_paper():
    columns = {
        r["benchmark"] for name in ("fovea_table1", "fovea_table2_ablation", "specvlm_tables") for r in read(name)
    }
    targets = {r["target"] for name in ("fovea_table1", "specvlm_tables") for r in read(name)}
    assert {column for names in BENCHMARKS.values() for column in names} <= columns
    assert {target for names in TARGETS.values() for target in names} == targets
    assert set(BENCHMARKS) <= {path.stem for path in (CONFIG_DIR / "benchmark").glob("*.yaml")}
    hub = {OmegaConf.load(path).get("hub_id") or "" for path in (CONFIG_DIR / "model").glob("*.yaml")}
    assert set(TARGETS) <= {name.rpartition("/")[2] for name in hub}


def test_memory_stands_beside_the_papers(tmp_path):
    folder = job(tmp_path / "run") / "evaluation" / "final"
    result = SpeedResult.load(folder)
    for prompt in result.prompts:
        prompt.speculative.peak_memory_bytes, prompt.autoregressive.peak_memory_bytes = 3 * 2**29, 2**30
    result.save(folder)
    cells = row(table(find_entries([tmp_path])[0], "FOVEA, Table 3"), "fovea correction")
    assert (cells["extra GiB"], cells["extra GiB here: a target"]) == ("0.378", "0.500")
    assert "over that of paired autoregressive decoding" in table([], "FOVEA, Table 3").note


@pytest.mark.parametrize(
    ("other", "delta"),
    [
        ({}, True),
        ({"benchmark": "mmt_bench"}, False),
        ({"target": "another"}, False),
        ({"target_weights": "ff"}, False),
        ({"target_name": "a copy of it"}, True),
        ({"max_new_tokens": 32}, False),
        ({"selection": {"temperature": 1.0}}, False),
    ],
)
def test_a_difference_is_to_a_fovea_of_the_same_conditions(tmp_path, other, delta):
    where = {"benchmark": "ocrbench", "target_name": "it", "target_weights": "00", "selection": {"temperature": 0.0}}
    job(tmp_path / "one" / "fovea", better=1, **{**where, **other})
    job(tmp_path / "two" / "dense", config=changed("drafter.retrieval.mode", "dense"), **where)
    own = table(find_entries([tmp_path])[0], "FOVEA, Table 7")
    assert own.here == (["Δ here: OCRBench, it"] if delta else [])


def test_a_difference_is_over_the_prompts_of_both(tmp_path):
    job(tmp_path / "fovea", better=1)
    folder = job(tmp_path / "dense", config=changed("drafter.retrieval.mode", "dense")) / "evaluation" / "final"
    result = SpeedResult.load(folder)
    SpeedResult(result.prompts[:1], {}, result.settings).save(folder)
    # The same change on every prompt: on the first alone as on all.
    assert row(table(find_entries([tmp_path])[0], "FOVEA, Table 7"), "dense")["Δ here: a target"].endswith(" / -1.00")


def test_controls_of_another_drafter_are_not_subtracted(tmp_path):
    for name, weights in (("fovea", "aa"), ("dense", "bb")):
        config = CONFIG if name == "fovea" else changed("drafter.retrieval.mode", "dense")
        typed = [] if name == "fovea" else ["drafter.retrieval.mode=dense"]
        folder = job(tmp_path / name, overrides=typed, config=config | {"task": "evaluate"})
        (folder / "provenance.json").write_text(json.dumps({"fingerprints": {"drafter": {"weights": weights}}}))
    assert table(find_entries([tmp_path])[0], "FOVEA, Table 7").here == []


@pytest.mark.parametrize(
    ("setting", "value", "variant"),
    [
        ("drafter.retrieval.rho", 0.6, None),
        ("drafter.retrieval.rho", 0.8, FULL),
        ("drafter.retrieval.k_min", 8, None),
        ("drafter.retrieval.k_max", 64, None),
        ("drafter.recursion", "corrected", None),
        ("drafter.visual_prefix", "topk", None),
        ("drafter.feature_injection", "none", None),
        ("drafter.num_blocks", 3, None),
        ("drafter.max_correction_depth", 4, None),
        ("objective.align_state", "raw", None),
        ("objective.gamma_w", 4.0, None),
        ("objective.chunk_rows", 7, FULL),
        ("drafter.retrieval.k", 99, FULL),  # the rule of mass reads no number
        ("model.retrieval.rho", 0.6, None),
        ("drafter.retrieval.k_min", 4, FULL),  # as the tiny target has it
    ],
)
def test_a_changed_fovea_is_not_the_papers(setting, value, variant):
    entry = entry_of("fovea", typed={setting: str(value)})
    node = entry.config
    *path, last = setting.split(".")
    for part in path:
        node = node[part]
    node[last] = value
    assert variant_of(entry) == variant


def test_a_sweep_over_rho_does_not_fill_the_rows_of_fovea(tmp_path):
    for rho in (0.6, 0.8, 0.95):
        config = changed("drafter.retrieval.rho", rho)
        job(tmp_path / str(rho), better=int(10 * rho) % 4, overrides=[f"drafter.retrieval.rho={rho}"], config=config)
    entries = find_entries([tmp_path])[0]
    own = next(entry for entry in entries if entry.fields["drafter.retrieval.rho"] == "0.8")
    for source in ("FOVEA, Table 1", "FOVEA, Table 2"):
        name = "FOVEA" if source.endswith("1") else "full"
        assert row(table(entries, source), name)["here: a target"] == shown(own)


def test_a_control_with_other_numbers_is_one_and_not_the_papers(tmp_path):
    config = changed("drafter.retrieval.mode", "random")
    config["drafter"]["retrieval"]["k"] = 8
    job(tmp_path / "fovea", better=1)
    job(tmp_path / "random", config=config)
    entries = find_entries([tmp_path])[0]
    assert {variant_of(entry) for entry in entries} == {FULL, "random_top16"}
    assert not table(entries, "FOVEA, Table 7").filled


def entry_of(experiment: str, method: str = "fovea", typed: dict[str, str] | None = None) -> Entry:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("train", overrides=[f"experiment={experiment}", "paths.output_dir=/run"])
    config = OmegaConf.to_container(cfg, resolve=False)
    return Entry("x", CONFIG_DIR, CONFIG_DIR, SpeedResult([], {}, {"method": method}), typed or {}, config, {})


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
