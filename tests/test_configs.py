"""Every configuration composes, fits its dataclasses, and is refused by name where it cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from datamodules.conversations import MMSpecConversations
from fovea.app.assemble import SPEED_EVALUATION
from fovea.app.launch import CONFIG_DIR, EXTRAS, missing_extras, unknown_names, unquoted
from fovea.app.settings import read_settings
from fovea.app.sources import source
from fovea.app.typed import SettingError
from fovea.targets.mid_states import default_mid_layers

MODELS = [path.stem for path in sorted((CONFIG_DIR / "model").glob("*.yaml"))]
GROUPS = (
    "benchmark",
    "callbacks",
    "data",
    "debug",
    "decode",
    "diagnostics",
    "drafter",
    "experiment",
    "launch",
    "logger",
    "method",
    "model",
    "objective",
    "optimizer",
    "scheduler",
    "search",
    "strategy",
    "trainer",
)
FILES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONFIG_DIR / group).glob("*.yaml"))]
#: Those whose plugin of Hydra's is installed.
CHOICES = [choice for choice in FILES if not missing_extras([choice])]
EXPERIMENTS = [path.stem for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml"))]


def composed(*overrides: str, name: str = "train", folder: str = "/run") -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=[*overrides, f"paths.output_dir={folder}"])


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_its_numbers_are_valid(choice):
    read_settings(composed(choice, name="evaluate" if choice.startswith(("method=", "diagnostics=")) else "train"))


@pytest.mark.parametrize("ablation", sorted(path.stem for path in (CONFIG_DIR / "experiment/ablation").glob("*.yaml")))
def test_an_ablation_is_one_change_of_fovea(ablation):
    changed, whole = composed(f"experiment=ablation/{ablation}"), composed("experiment=fovea")
    read_settings(changed)
    leaves = [dict(_leaves(OmegaConf.to_container(cfg, resolve=False))) for cfg in (changed, whole)]
    differing = {key for key in leaves[0] | leaves[1] if leaves[0].get(key) != leaves[1].get(key)}
    assert changed.name == ablation
    assert len(differing - {"name", "drafter.retrieval.k"}) == 1


def _leaves(node, where=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_with_every_model(name, model, experiment):
    read_settings(composed(f"model={model}", f"experiment={experiment}", name=name))


def test_a_choice_that_needs_a_plugin_says_which():
    assert {choice for choice in FILES if choice.startswith(("launch=", "search="))} == set(EXTRAS)


def test_every_group_is_tested():
    folders = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    assert folders - {"hydra", "paths", "local"} == set(GROUPS)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.split("=")[0] in ("callbacks", "logger", "optimizer")])
def test_objects_can_be_made(choice, tmp_path):
    group = choice.split("=")[0]
    node = composed(choice, folder=str(tmp_path))[group]
    OmegaConf.set_struct(node, False)
    items = {group: node} if "_target_" in node else node
    for name, item in items.items():
        instantiate(item, **({"evaluation": None} if name == SPEED_EVALUATION else {}))


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONFIG_DIR)))
def test_every_field_is_commented(path: Path):
    """A comment stands behind the field or in the line above; Hydra's own keys explain themselves."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "a file starts with what it is for"
    if {"hydra", "job_logging", "experiment", "debug", "method", "launch", "search"} & set(
        path.relative_to(CONFIG_DIR).parts[:-1]
    ):
        return  # settings of other files, which explain them
    for number, line in enumerate(lines):
        field = line.strip().partition(":")[0]
        is_field = line.strip() and not line.strip().startswith(("#", "-")) and not field.startswith(("_", "defaults"))
        opens_node = line.rstrip().endswith(":")
        if is_field and not opens_node and field not in ("name", "logging_interval"):
            assert "#" in line or lines[number - 1].strip().startswith("#"), f"{path}: {line}"


class TestTheRealModel:
    """model=qwen25vl experiment=fovea is the paper's recipe, Table 6."""

    @pytest.fixture
    def cfg(self):
        return composed("model=qwen25vl", "experiment=fovea")

    def test_its_training(self, cfg):
        assert (cfg.model.hub_id, cfg.model.path) == ("Qwen/Qwen2.5-VL-7B-Instruct", None)
        assert (cfg.data.loader.batch_size, cfg.trainer.accumulate_grad_batches, cfg.trainer.devices) == (4, 1, 2)
        assert (cfg.optimizer.lr, list(cfg.optimizer.betas), cfg.optimizer.weight_decay) == (5e-5, [0.9, 0.95], 0)
        assert (cfg.scheduler._target_.split(".")[-1], cfg.scheduler.warmup_steps) == ("deepspeed_log", 2000)
        assert (cfg.trainer.max_epochs, cfg.trainer.gradient_clip_val, cfg.seed) == (12, 0.5, 42)
        assert cfg.trainer.precision == "bf16-mixed"

    def test_its_drafter_and_tree(self, cfg):
        settings = read_settings(cfg)
        assert settings.drafter.num_blocks == 2
        assert settings.export.mid_layers == tuple(range(1, 10))
        retrieval = settings.drafter.retrieval
        assert (retrieval.mode, retrieval.rho, retrieval.k_min, retrieval.k_max) == ("mass", 0.8, 32, 256)
        assert (settings.tree.width, settings.tree.depth, settings.tree.nodes) == (6, 6, 40)
        assert settings.speed.max_new_tokens == 200

    def test_the_appendix(self):
        retrieval = read_settings(composed("model=qwen25vl", "experiment=fovea_appendix")).drafter.retrieval
        assert (retrieval.mode, retrieval.k) == ("topk", 16)

    def test_what_only_the_user_knows_is_asked_for(self, cfg):
        for where, field in [("data.train", "data.path"), ("benchmark.conversations", "data.heldout_path")]:
            with pytest.raises(SettingError, match=f"{field} is not set; .* {field}=<path>"):
                source(cfg, where)
        with pytest.raises(SettingError, match=r"benchmark\.folder is not set"):
            source(composed("benchmark=mmspec"), "benchmark.conversations")


def test_the_questions_of_a_benchmark_can_teach(tmp_path):
    (tmp_path / "mmspec.jsonl").touch()
    cfg = composed("data=benchmark", "benchmark=mmspec", f"benchmark.folder={tmp_path}")
    (asked, teaching) = (source(cfg, where) for where in ("benchmark.conversations", "data.train"))
    assert type(teaching) is type(asked) is MMSpecConversations
    with pytest.raises(SettingError, match=r"benchmark\.folder is not set"):
        source(composed("data=benchmark", "benchmark=mmspec"), "data.train")


#: Layers of the target, drafter blocks, last mid layer; global batch, peak rate, warm-up, epochs, schedule.
RECIPES = {
    "llava_next_vicuna_7b": (32, 2, 10, 16, 5e-5, 4326, 12, "linear"),  # FOVEA, Tables 6 and 8
    "llava_next_vicuna_13b": (40, 3, 10, 16, 5e-5, 4326, 12, "linear"),
    "llava_next_mistral_7b": (32, 2, 10, 16, 5e-5, 4326, 12, "linear"),
    "qwen25vl_3b": (36, 2, 12, 8, 5e-5, 2000, 12, "deepspeed_log"),
    "llava15_7b": (32, 2, 10, 128, 8e-5, 0, 1, "constant"),  # SpecVLM, section 4.1
    "llava15_13b": (40, 3, 10, 128, 5e-5, 0, 1, "constant"),
    "open_llava_next_7b": (32, 2, 10, 128, 8e-5, 0, 1, "constant"),
}


@pytest.mark.parametrize("model", RECIPES)
def test_the_papers_recipes(model):
    layers, blocks, last_mid, batch, lr, warmup, epochs, schedule = RECIPES[model]
    cfg = composed(f"model={model}", "experiment=fovea")
    settings = read_settings(cfg)
    assert cfg.model.hub_id
    assert cfg.model.revision
    assert settings.drafter.num_blocks == blocks
    assert settings.export.mid_layers == tuple(range(1, last_mid + 1))
    assert layers == 40 or list(settings.export.mid_layers) == default_mid_layers(layers)
    trained = cfg.data.loader.batch_size * cfg.trainer.accumulate_grad_batches * cfg.trainer.devices
    assert (trained, cfg.optimizer.lr, cfg.trainer.max_epochs) == (batch, lr, epochs)
    named = cfg.scheduler.get("_target_", cfg.scheduler.get("name")).split(".")[-1]
    assert (named, cfg.model.recipe.warmup_steps) == (schedule, warmup)


@pytest.mark.parametrize("model", MODELS)
def test_revisions_are_commits(model):
    """A branch may move under a run; one model's repository has no commit that we know."""
    node = composed(f"model={model}").model
    if node.hub_id is not None and model != "open_llava_next_7b":
        assert re.fullmatch("[0-9a-f]{40}", node.revision)


class TestTheCommandLineWins:
    @pytest.mark.parametrize("order", [0, 1])
    def test_whatever_the_order(self, order):
        overrides = ["model=qwen25vl", "experiment=fovea_appendix"]
        cfg = composed(*(reversed(overrides) if order else overrides))
        assert (cfg.model.name, cfg.drafter.retrieval.mode) == ("qwen25vl", "topk")

    def test_over_what_a_model_chooses(self):
        cfg = composed("model=qwen25vl", "data=tiny", "decode=cpu", "scheduler=linear")
        assert cfg.scheduler._target_.endswith("linear")
        assert cfg.decode == composed().decode
        assert "heldout_path" not in cfg.data

    def test_over_an_experiment_and_a_debug_recipe(self):
        cfg = composed("experiment=smoke", "debug=default", "trainer.max_steps=7", "name=mine")
        assert (cfg.trainer.max_steps, cfg.name) == (7, "mine")
        assert composed("experiment=smoke", "debug=default").trainer.max_steps == 1

    def test_over_an_experiment_that_names_a_model(self, tmp_path):
        recipe = "# @package _global_\ndefaults:\n  - override /model: qwen25vl\n"
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "other.yaml").write_text(recipe)
        search = f"hydra.searchpath=[file://{tmp_path}]"
        assert composed("experiment=other", search).model.name == "qwen25vl"
        assert composed("experiment=other", "model=tiny_qwen25vl", search).model.name == "tiny_qwen25vl"


REFUSED = [
    ("drafter.retrieval.rho=0", "retrieval.rho is 0"),
    ("drafter.retrieval.rho=1.5", "retrieval.rho is 1.5"),
    ("drafter.retrieval.rho=-0.1", "retrieval.rho is -0.1"),
    ("drafter.retrieval.rho=nan", "retrieval.rho is nan"),
    ("drafter.retrieval.rho=high", "drafter.retrieval.rho must be a number, got 'high'"),
    ("drafter.retrieval.rho=", "drafter.retrieval.rho must be a number, got ''"),
    ("drafter.retrieval.rho=null", "drafter.retrieval.rho must be a number, got None"),
    ("model.retrieval.rho=2", "retrieval.rho is 2"),
    ("drafter.retrieval.k_min=64", "retrieval.k_min 64 is above retrieval.k_max"),
    ("drafter.retrieval.k_min=0", "retrieval.k_min is 0"),
    ("drafter.retrieval.k_max=1", "is above retrieval.k_max 1"),
    ("drafter.retrieval.mode=mas", "drafter.retrieval.mode is 'mas'; choose from: mass, topk"),
    ("+drafter.retrieval.roh=0.5", r"drafter.retrieval has no field 'roh' \(did you mean 'rho'\?\)"),
    ("+speed.batch_size=2", "speed: batch_size is 2; one request is decoded at a time"),
    ("drafter.name=eagle9", r"no drafter is called 'eagle9'; choose from \[.*'fovea'"),
    ("drafter.num_blocks=0", "drafter.num_blocks is 0"),
    ("drafter.num_blocks='08'", "drafter.num_blocks must be a whole number, got '08'"),
    ("drafter.depth=0", "drafter.depth is 0"),
    ("drafter.use_gate=maybe", "drafter.use_gate must be true or false, got 'maybe'"),
    ("speed_eval=perhaps", "speed_eval must be true or false, got 'perhaps'"),
    ("unroll.steps=0", "unroll.steps is 0"),
    ("unroll.max_anchors=0", "unroll.max_anchors is 0"),
    ("unroll.steps=9", "unroll.steps is 9; drafter.depth allows 1 to 5"),
    ("decode.tree.width=0", "decode.tree: tree width 0"),
    ("decode.tree.depth=0", "drafter.depth is 0"),
    ("decode.tree.nodes=4", "decode.tree: a tree of 4 nodes holds 3 drafts, too few for depth"),
    ("decode.tree.levels=flat", "decode.tree.levels is 'flat'; choose from: eagle, strict"),
    ("decode.max_new_tokens=0", "max_new_tokens is 0"),
    ("decode.temperature=-0.1", "decode: temperature is -0.1"),
    ("decode.temperature=warm", "decode.temperature must be a number, got 'warm'"),
    ("decode.top_p=0", r"decode: top_p is 0.0; it must be in \(0, 1\]"),
    ("decode.top_p=1.01", "decode: top_p is 1.01"),
    ("decode.top_k=-1", "decode: top_k is -1"),
    ("decode.generation_config=both", "decode.generation_config is 'both'; choose from: none, target"),
    ("+decode.processors.num_beams=4", "decode: processors asks for num_beams=4, which cannot be applied to a draft"),
    ("+decode.processors.temperature=1", "decode: processors.temperature has a field of its own: set temperature"),
    ("objective.margin=wide", "objective.margin must be a number"),
    ("objective.lambda_kl=-1", "objective.lambda_kl is -1"),
    ("objective.candidates=0", "objective.candidates is 0"),
    ("data.export.mid_layers=3", r"data.export.mid_layers must be a list such as \[1,2\], got 3"),
    ("model.mid_layers=[]", "mid_layers must be different layers"),
    ("data.export.dtype=int4", "data.export.dtype is 'int4'; choose from"),
    ("data.loader.batch_size=0", "data.loader: batch_size must be at least 1"),
    ("data.loader.val_fraction=1", "data.loader: val_fraction must be in"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[override for override, _ in REFUSED])
def test_bad_values_are_refused_before_any_model_is_built(override, message):
    with pytest.raises(ValueError, match=message):
        read_settings(composed("drafter.retrieval.k_max=32", "decode.tree.depth=4", override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.compression.mode=chose", "drafter.compression.mode is 'chose'; choose from: weight, concat, select"),
        ("drafter.compression.conv_ratio=0", "compression.conv_ratio is 0"),
        ("drafter.compression.temperature=0", "compression.temperature is 0"),
        ("drafter.rope=target", "set drafter.rope=1d"),
    ],
)
def test_bad_values_of_the_compressor_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        read_settings(composed("drafter=specvlm", override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.retrieval.roh=0.5", "drafter.retrieval has no field 'roh' (did you mean 'rho'?); choose from: "),
        ("drafter.retreival.rho=0.5", "drafter has no field 'retreival' (did you mean 'retrieval'?); choose from: "),
        ("modle=qwen25vl", "the configuration has no field 'modle' (did you mean 'model'?); choose from: "),
        ("trainer.max_epoch=3", "trainer has no field 'max_epoch' (did you mean 'max_epochs'?); choose from: "),
    ],
)
def test_unknown_names_list_the_choices(override, message):
    (line,) = unknown_names(["seed=1", override, "experiment=smoke"], "train")
    assert line.startswith(message)


def test_known_names_are_not_complained_about():
    typed = ["-m", "drafter.retrieval.rho=0.6,0.8", "model=qwen25vl", "+new.field=1", "paths.output_dir=/elsewhere"]
    assert unknown_names(typed, "train") == []


def test_a_path_with_an_equals_sign_is_shown_how_to_be_quoted():
    (line,) = unquoted(["seed=1", "ckpt=a/epoch=3/drafter", "'b=c'", "ckpt='x=1'", "-m"])
    assert line.endswith("""'ckpt="a/epoch=3/drafter"'""")


def test_yaml_files_have_no_duplicate_keys():
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
            return super().construct_mapping(node, deep)

    for path in CONFIG_DIR.rglob("*.yaml"):
        yaml.load(path.read_text(encoding="utf-8"), Strict)
