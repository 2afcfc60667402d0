"""Settings of an earlier run hold, unless they are typed again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from omegaconf import OmegaConf

from fovea.app.inherit import inherit, parse
from fovea.app.resumable import _KEPT, require_checkpoint
from fovea.app.runs import continued, initial_drafter, saved_config
from fovea.app.typed import SettingError
from fovea.drafters.checkpoint import CheckpointError
from tests.app.test_damaged_checkpoint import fit_loop

GROUPS = ("decode", "drafter", "model")


@pytest.fixture
def saved():
    return OmegaConf.create(
        {
            "seed": 7,
            "paths": {"cache": "there"},
            "model": {"rho": 0.5},
            "drafter": {"blocks": 3, "retrieval": {"rho": "${model.rho}", "k_min": 4}},
            "decode": {"nodes": 40},
        }
    )


def composed():
    return OmegaConf.create(
        {
            "seed": 42,
            "paths": {"cache": "here"},
            "model": {"rho": 0.8},
            "drafter": {"blocks": 2, "retrieval": {"rho": 0.8, "k_min": 2}},
            "decode": {"nodes": 8},
        }
    )


def test_typed_values_are_nested_below_their_group():
    typed = parse(["drafter.retrieval.rho=0.6", "drafter.retrieval.mode=topk", "decode=paper", "seed=1"], GROUPS)
    assert typed.below("drafter") == {"retrieval": {"rho": 0.6, "mode": "topk"}}
    assert typed.groups == {"decode"}
    assert typed.values["seed"] == 1


def test_typed_values_keep_their_types():
    written = {
        "[1,2]": [1, 2],
        "[]": [],
        "": "",
        "null": None,
        "1e-4": 1e-4,
        "true": True,
        "yes": "yes",  # what a field of true and false makes of it is its own matter
        "08": "08",
        "'a,b'": "a,b",
        "a b": "a b",
    }
    typed = parse([f"drafter.x{number}={text}" for number, text in enumerate(written)], GROUPS)
    values = list(typed.below("drafter").values())
    assert values == list(written.values())
    assert [type(value) for value in values] == [type(value) for value in written.values()]


def test_the_saved_holds_where_nothing_was_typed(saved):
    typed = parse(["drafter.retrieval.rho=0.6"], GROUPS)
    cfg = inherit(composed(), saved, typed, ["model", "drafter", "decode"])
    assert cfg.drafter == {"blocks": 3, "retrieval": {"rho": 0.6, "k_min": 4}}
    assert cfg.decode.nodes == 40
    assert cfg.seed == 42  # not among the nodes
    assert cfg.paths.cache == "there"


def test_a_typed_group_is_the_new_one(saved):
    cfg = inherit(composed(), saved, parse(["decode=paper"], GROUPS), ["decode", "drafter"])
    assert cfg.decode.nodes == 8
    assert cfg.drafter.blocks == 3


def test_interpolations_of_the_saved_follow_typed_values(saved):
    cfg = inherit(composed(), saved, parse(["model.rho=0.9"], GROUPS), ["model", "drafter"])
    assert cfg.drafter.retrieval.rho == 0.9


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"is no run folder.*config\.yaml is missing"):
        saved_config(tmp_path)


def test_a_run_goes_on_in_its_own_folder_once_it_has_a_checkpoint(tmp_path):
    """Its curves so far are kept: loggers begin their files anew."""
    cfg = OmegaConf.create({"resume": "own", "paths": {"output_dir": str(tmp_path)}})
    assert continued(cfg, parse([], GROUPS)) == (cfg, None)
    for again in (1, 2):
        for name in ("metrics/metrics.csv", "checkpoints/last.ckpt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{again}")
        kept = {name: {} if kind is Mapping else kind() for name, (kind, *_) in _KEPT.items()}
        torch.save(kept | {"loops": {"fit_loop": fit_loop()}}, tmp_path / "checkpoints" / "last.ckpt")
        assert continued(cfg, parse([], GROUPS)) == (cfg, tmp_path / "checkpoints" / "last.ckpt")
        assert (tmp_path / f"earlier_metrics_{again}" / "metrics.csv").read_text() == f"{again}"
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"cut")
    with pytest.raises(SettingError, match=r"last\.ckpt is cut, damaged or no checkpoint"):
        continued(cfg, parse([], GROUPS))


def test_of_a_folder_of_deepspeed_the_files_are_looked_at(tmp_path):
    states = tmp_path / "checkpoint" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    with pytest.raises(SettingError, match="holds no model states"):
        require_checkpoint(tmp_path)
    torch.save({"module": torch.arange(9)}, states)
    require_checkpoint(tmp_path)
    states.write_bytes(states.read_bytes()[:-40])
    with pytest.raises(SettingError, match=r"model_states\.pt is cut"):
        require_checkpoint(tmp_path)


class TestInitialDrafter:
    """``init_from`` takes a run folder or an exported drafter, and refuses anything else before work begins."""

    def test_a_run_and_its_drafter_name_the_same_folder(self, tmp_path):
        drafter = tmp_path / "run" / "drafter"
        for folder, name in ((drafter, "model.safetensors"), (tmp_path / "run" / ".hydra", "config.yaml")):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        (drafter / "config.json").write_text('{"drafter": "vispec"}')
        for source in (tmp_path / "run", drafter):
            cfg = OmegaConf.create({"init_from": str(source), "drafter": {"name": "vispec"}})
            assert initial_drafter(cfg) == drafter
            cfg.drafter.name = "dream"
            with pytest.raises(CheckpointError, match="is a 'vispec' and not a 'dream'"):
                initial_drafter(cfg)
        assert initial_drafter(OmegaConf.create({"init_from": None})) is None

    def test_nothing_and_a_lightning_checkpoint_are_refused(self, tmp_path):
        cfg = OmegaConf.create({"init_from": str(tmp_path / "nowhere"), "drafter": {"name": "vispec"}})
        with pytest.raises(FileNotFoundError, match=r"no drafter checkpoint at .*nowhere"):
            initial_drafter(cfg)
        cfg.init_from = "outputs/checkpoints/last.ckpt"
        with pytest.raises(SettingError, match=r"last\.ckpt resumes a training"):
            initial_drafter(cfg)

    def test_a_resumed_run_does_not_start_from_it_again(self):
        cfg = OmegaConf.create({"init_from": "a", "resume": "b"})
        with pytest.raises(SettingError, match="give one of them"):
            continued(cfg, parse([], GROUPS))
