"""A run folder of anybody's: what its settings name does not run, unless it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from fovea.app.inherit import CommandLine, parse
from fovea.app.launch import CONFIG_DIR
from fovea.app.runs import CONFIG, KEPT_CONFIG, continued, evaluated
from fovea.app.trust import refuse_code
from fovea.app.typed import SettingError
from tests.app.conftest import run


def composed(task: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(task, overrides=[*overrides, "paths.output_dir=out"])


def typed(*overrides: str) -> CommandLine:
    return parse(list(overrides), ("data", "drafter", "decode"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder whose settings are those of an ordinary run; tests put more into them."""
    for name in (CONFIG, KEPT_CONFIG):
        (tmp_path / name).parent.mkdir()
        OmegaConf.save(composed("train"), tmp_path / name)
    return tmp_path


def arm(folder: Path, where: str, value: object) -> None:
    """Puts ``value`` at ``where`` into the settings of the run in ``folder``."""
    cfg = OmegaConf.load(folder / KEPT_CONFIG)
    OmegaConf.update(cfg, where, value, force_add=True)
    OmegaConf.save(cfg, folder / KEPT_CONFIG)


#: Where, what, and what is to be typed.
ARMED = [
    ("plugins", ["evil.evilmod"], "plugins=[evil.evilmod]"),
    ("data.train", "pipe:sh -c 'touch owned' {name}", "data.train=\"pipe:sh -c 'touch owned' {name}\""),
    ("data.val", "gs://x'; touch owned; '", "data.val=\"gs://x'; touch owned; '\""),
    ("data.val", "hf://x'; touch owned; '", "data.val=\"hf://x'; touch owned; '\""),
    ("data.name", {"deep": [{"_target_": "os.system"}]}, "++data.name.deep[0]._target_=os.system"),
    ("optimizer._target_", "os.system", "++optimizer._target_=os.system"),
    ("optimizer._target_", "torch.load", "++optimizer._target_=torch.load"),
    # Reached through a module of a package that is trusted.
    ("optimizer._target_", "torch.optim.optimizer.os.system", "++optimizer._target_=torch.optim.optimizer.os.system"),
    ("data._target_", "fovea.app.provenance.subprocess.Popen", "++data._target_=fovea.app.provenance.subprocess.Popen"),
    ("model.build._target_", "nowhere.Evil", "++model.build._target_=nowhere.Evil"),
]


@pytest.mark.parametrize(("where", "value", "remedy"), ARMED, ids=lambda value: str(value)[:30])
def test_what_a_folder_names_is_refused_by_what_to_type(folder, where, value, remedy):
    arm(folder, where, value)
    with pytest.raises(SettingError, match="what is read does not run code") as refused:
        continued(composed("train", f"resume={folder}"), typed())
    assert str(folder) in str(refused.value)
    assert f"'{remedy}'" in str(refused.value)
    if not where.startswith("optimizer"):  # an evaluation has none of its own
        with pytest.raises(SettingError, match="what is read does not run code"):
            evaluated(composed("evaluate", f"ckpt={folder}"), typed())


def test_an_interpolation_hides_nothing(folder):
    arm(folder, "name", "pipe:touch owned {name}")
    arm(folder, "data.train", "${name}")
    with pytest.raises(SettingError, match="the command 'pipe:touch owned"):
        continued(composed("train", f"resume={folder}"), typed())


def test_settings_that_hold_themselves_come_to_an_end():
    cfg = composed("train")
    merged = cfg.copy()
    OmegaConf.update(merged, "data.loader.again", "${optimizer}", force_add=True)
    OmegaConf.update(merged, "optimizer.again", "${data.loader}", force_add=True)
    with pytest.raises(SettingError, match=r"in a circle, at (data\.loader|optimizer)\.again\.again"):
        refuse_code(merged, cfg, Path("run"))


def test_what_is_typed_is_trusted():
    pipe = "pipe:cat x/{name}"
    overrides = [f'data.train="{pipe}"', "plugins=[mine]", "++optimizer._target_=collections.OrderedDict"]
    cfg = composed("train", *overrides)
    assert cfg.data.train == pipe
    refuse_code(cfg, cfg, Path("run"))
    merged = cfg.copy()
    merged.data.val = pipe  # somewhere else it is another
    with pytest.raises(SettingError, match=r"'data.val="):
        refuse_code(merged, cfg, Path("run"))


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.SGD",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.strategies.FSDPStrategy",
        "datamodules.artifacts.LoaderConfig",
        "wandb.Settings",
    ],
)
def test_parts_of_the_program_need_no_typing(target):
    cfg = composed("train")
    merged = cfg.copy()
    for name, value in (("_target_", target), ("address", "https://host/x"), ("hub", "hf://datasets/a")):
        OmegaConf.update(merged, f"data.loader.{name}", value, force_add=True)
    refuse_code(merged, cfg, Path("run"))


@pytest.mark.parametrize("experiment", ["fovea", "msd", "vispec_stage2", "smollm2"])
def test_settings_of_our_own_are_taken_over(experiment):
    refuse_code(
        composed("train", f"experiment={experiment}", "strategy=deepspeed_zero2"), composed("train"), Path("run")
    )


@pytest.mark.slow
def test_the_commands_run_nothing(folder):
    """A module beside the folder, a command in its settings, and what was typed for an evaluation that is resumed."""
    (folder / "evil.py").write_text("open('owned', 'w')")
    arm(folder, "plugins", ["evil"])
    for script, word in (("train.py", "resume=."), ("evaluate.py", "ckpt=.")):
        done = run(script, folder, word, "hydra.run.dir=new")
        assert done.returncode == 1
        assert "would run the module 'evil'" in done.stderr
        assert "Traceback" not in done.stderr
    arm(folder, "plugins", [])
    arm(folder, "task", "evaluate")
    (folder / ".fovea" / "overrides.yaml").write_text('["plugins=[evil]", "ckpt=x"]')
    done = run("evaluate.py", folder, "resume=.", "hydra.run.dir=new")
    assert done.returncode == 1
    assert "type it again: 'plugins=[evil]'" in done.stderr
    assert not (folder / "owned").exists()
