"""Which checkpoint an evaluation takes for a method, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from datamodules.conversation_source import SourceError
from fovea.app import assemble
from fovea.app.inherit import CommandLine, parse
from fovea.app.launch import CONFIG_DIR
from fovea.app.runs import evaluated
from fovea.app.settings import read_settings
from fovea.app.typed import SettingError
from fovea.artifacts.fingerprint import processor_settings
from fovea.drafters.checkpoint import CheckpointError, Teaching, save_drafter
from fovea.drafters.eaglevlm import EagleVlmConfig
from fovea.drafters.jacobi_lookahead import JacobiConfig
from fovea.drafters.registry import build_drafter
from fovea.drafters.training_free import CONFIGS, LookaheadConfig, TrainingFree
from fovea.targets.load import weights_fingerprint

GROUPS = ("decode", "diagnostics", "drafter", "method", "model")


def composed(*overrides: str, name: str = "evaluate") -> tuple[DictConfig, CommandLine]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=[*overrides, "paths.output_dir=/run"]), parse(list(overrides), GROUPS)


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """A folder with a run named fovea, whose tree has 33 nodes, and exported drafters of eagle9 and of eaglevlm."""
    run = tmp_path / "fovea"
    saved, _ = composed("decode.tree.nodes=33", "drafter.retrieval.rho=0.5", "paths.cache=/there", name="train")
    (run / ".hydra").mkdir(parents=True)
    OmegaConf.save(saved, run / ".hydra" / "config.yaml")
    eaglevlm = {"input_norm": True, "rope": "target"}
    for folder, drafter, config in (
        (run / "drafter", "fovea", {}),
        (tmp_path / "eagle9", "eagle9", {}),
        (tmp_path / "eaglevlm", "eaglevlm", eaglevlm),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"drafter": drafter, "config": config}))
    return tmp_path


@pytest.mark.parametrize("choice", ["method=pld", "method=lookahead", "method=lookahead_jacobi", "drafter=pld"])
def test_methods_without_weights_need_no_checkpoint(choice, checkpoints):
    for more in ((), (f"checkpoints={checkpoints}",)):
        cfg, checkpoint = evaluated(*composed(choice, "decode=paper", *more))
        assert checkpoint is None
        assert cfg.drafter.name in CONFIGS
        assert read_settings(cfg).speed.max_new_tokens == 200
    with pytest.raises(SettingError, match=r"drafts without weights and has no checkpoint; leave ckpt out"):
        evaluated(*composed(choice, f"ckpt={checkpoints / 'fovea'}"))


def test_the_variants_of_lookahead():
    chosen = {name: read_settings(composed(f"method={name}")[0]).drafter for name in ("lookahead", "lookahead_jacobi")}
    assert {name: config.variant for name, config in chosen.items()} == {
        "lookahead": "trie",
        "lookahead_jacobi": "jacobi",
    }


@pytest.mark.parametrize("decode", ["paper", "eagle"])
def test_lookahead_has_the_published_sizes_beside_published_trees(decode):
    published = LookaheadConfig(jacobi=JacobiConfig(seed=42))
    assert read_settings(composed("method=lookahead", f"decode={decode}")[0]).drafter == published


@pytest.mark.parametrize("method", ["lookahead", "lookahead_jacobi"])
def test_lookahead_has_small_passes_where_the_tree_is_small(method, small_target):
    drafter = read_settings(composed(f"method={method}", "decode=cpu")[0]).drafter
    assert TrainingFree("lookahead", drafter).proposer(small_target.spec).max_drafts < 18


@pytest.mark.parametrize("named", ["checkpoints={0}", "ckpt={0}/fovea", "ckpt={0}/fovea/drafter"])
def test_a_trained_method_takes_its_checkpoint_and_the_settings_of_its_run(named, checkpoints):
    cfg, checkpoint = evaluated(*composed("method=fovea", named.format(checkpoints)))
    assert checkpoint == checkpoints / "fovea" / "drafter"
    assert (cfg.decode.tree.nodes, cfg.drafter.retrieval.rho, cfg.paths.cache) == (33, 0.5, "/there")
    assert (cfg.method, cfg.task) == ("fovea", "evaluate")
    assert evaluated(*composed("method=fovea", named.format(checkpoints), "decode=paper"))[0].decode.tree.nodes == 40


def test_without_a_method_the_checkpoint_says_what_it_is(checkpoints):
    cfg, checkpoint = evaluated(*composed(f"ckpt={checkpoints / 'eagle9'}"))
    assert (cfg.method, checkpoint) == (None, checkpoints / "eagle9")


@pytest.mark.parametrize("choice", ["method=fovea", "drafter=fovea"])
@pytest.mark.parametrize("file", ["", "/config.json"])
def test_another_methods_checkpoint_is_refused_by_name(choice, file, checkpoints):
    with pytest.raises(SettingError, match=r"fovea drafts with a fovea drafter, and .*eagle9.* holds a eagle9 drafter"):
        evaluated(*composed(choice, f"ckpt={checkpoints}/eagle9{file}"))


def test_a_sister_methods_checkpoint_is_refused_by_what_differs(checkpoints):
    """EAGLE-2 is the drafter of EagleVLM without its input norm."""
    ckpt = f"ckpt={checkpoints}/eaglevlm"
    assert evaluated(*composed("method=eaglevlm", ckpt))[1] == checkpoints / "eaglevlm"
    with pytest.raises(SettingError, match=r"eagle2 drafts with drafter\.input_norm=False, .* was trained with True"):
        evaluated(*composed("method=eagle2", ckpt))
    other = checkpoints / "weight"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps({"drafter": "specvlm", "config": {"compression": {"mode": "weight"}}})
    )
    with pytest.raises(SettingError, match=r"specvlm drafts with drafter\.compression\.mode=select, .* with weight"):
        evaluated(*composed("method=specvlm", f"ckpt={other}"))


def test_another_target_of_the_same_sizes_is_refused(small_target, small_target_path, tmp_path):
    """Answers would still be exact, and acceptance poor without a word."""
    drafter = build_drafter("eaglevlm", small_target.spec, EagleVlmConfig(depth=2), small_target.head)
    fingerprint = weights_fingerprint(small_target_path)
    save_drafter(tmp_path / "drafter", drafter, Teaching((1, 2), fingerprint))
    other = Path(shutil.copytree(small_target_path, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][5] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    cfg, _ = composed(f"model.path={small_target_path}")
    job = assemble.Job(cfg, read_settings(cfg), torch.device("cpu"), tmp_path)
    assert assemble.judged_drafter(job, small_target_path, tmp_path / "drafter", {}).spec == small_target.spec
    with pytest.raises(
        CheckpointError, match=rf"taught with target_fingerprint '{fingerprint}', not '.*with model\.path=<folder>, or"
    ):
        assemble.judged_drafter(job, other, tmp_path / "drafter", {})


def test_another_processor_is_warned_of(small_target, small_target_path, tmp_path, caplog):
    """A target with other pixels per picture has the same weights, and its answers are exact too."""
    settings = processor_settings(small_target_path)
    other = {name: value for name, value in settings.items() if name != "patch_size"} | {"max_pixels": 1}
    drafter = build_drafter("eaglevlm", small_target.spec, EagleVlmConfig(depth=2), small_target.head)
    cfg, _ = composed(f"model.path={small_target_path}")
    job = assemble.Job(cfg, read_settings(cfg), torch.device("cpu"), tmp_path)
    for name, processor in {"same": settings, "other": other}.items():
        save_drafter(tmp_path / name, drafter, Teaching((1, 2), weights_fingerprint(small_target_path), processor))
        assemble.judged_drafter(job, small_target_path, tmp_path / name, {})
        assert ("max_pixels was 1 and is" in caplog.text) == (name == "other")


def test_a_missing_checkpoint_is_asked_for(tmp_path):
    with pytest.raises(SettingError, match=r"ckpt is not set; give a run folder"):
        evaluated(*composed("method=fovea"))
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint of fovea at {tmp_path}/fovea; checkpoints=<folder>"):
        evaluated(*composed("method=fovea", f"checkpoints={tmp_path}"))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_there_is_nothing_to_train(name):
    cfg, _ = composed(f"drafter={name}", name="train")
    with pytest.raises(
        SettingError, match=rf"{name} has no weights, so there is nothing to train: python evaluate\.py"
    ):
        assemble.start(cfg)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_without_weights_there_is_no_visual_budget(name):
    cfg, _ = composed(f"method={name}", "diagnostics=budget")
    with pytest.raises(SettingError, match=rf"{name} has no weights and sees no picture, so it has no visual budget"):
        assemble.start(cfg)


def test_a_budget_is_measured_where_it_is_asked_for_and_not_inherited(checkpoints):
    asked, _ = evaluated(*composed(f"ckpt={checkpoints}/fovea", "diagnostics=budget", "diagnostics.focus_tokens=4"))
    budget = read_settings(asked).budget
    assert (budget.ratios, budget.low, budget.high, budget.focus_tokens) == ((0, 0.25, 0.5, 0.75, 1), 0.25, 0.75, 4)
    assert read_settings(evaluated(*composed(f"ckpt={checkpoints}/fovea"))[0]).budget is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.max_ngram=0", "drafter: max_ngram is 0"),
        ("drafter.continuation=whole", "drafter.continuation is 'whole'; choose from: before_tail, in_text, cut"),
        ("+drafter.ngram=2", r"drafter has no field 'ngram' \(did you mean 'max_ngram'"),
        ("+speed.batch_size=2", "speed: batch_size is 2; one request is decoded at a time: leave it at 1"),
        ("drafter=lookahead drafter.variant=tree", "drafter.variant is 'tree'; choose from: trie, jacobi"),
        ("drafter=lookahead drafter.trie.branch_length=0", "drafter.trie: branch_length is 0"),
        ("drafter=lookahead drafter.jacobi.level=2", "drafter.jacobi: level is 2"),
    ],
)
def test_bad_numbers_are_refused_by_name(override, message):
    overrides = override.split() if override.startswith("drafter=") else ["drafter=pld", override]
    with pytest.raises(SettingError, match=message):
        read_settings(composed(*overrides)[0])


def test_a_benchmark_is_read_before_the_target_is_touched(tmp_path):
    """Its second record lacks its question, then its picture."""
    (tmp_path / "test/png").mkdir(parents=True)
    (tmp_path / "test/png/1.png").touch()
    good = {"imgname": "1.png", "query": "How?", "label": "4"}
    cfg, _ = composed("method=pld", "benchmark=chartqa", f"benchmark.folder={tmp_path}")
    for bad, message in (({"query": None}, "the question is null"), ({"imgname": "2.png"}, r"2\.png' does not exist")):
        (tmp_path / "test/test_human.json").write_text(json.dumps([good, {**good, **bad}]))
        with pytest.raises(SourceError, match=rf"test_human\.json, record 2: .*{message}"):
            assemble.start(cfg)
    path = tmp_path / "own.jsonl"
    asked = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["lost.png"]}
    path.write_text("\n".join(json.dumps({"key": key, **asked}) for key in "ab"))
    cfg, _ = composed("method=pld", "benchmark=jsonl", f"benchmark.path={path}", "benchmark.limit=1")
    with pytest.raises(SourceError, match=r"own\.jsonl, line 1: .*lost\.png' does not exist \(1 of 1 records lack one"):
        assemble.start(cfg)
