"""Drafter checkpoints: round trip, strictness, and refusal of what does not fit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea.drafters.checkpoint import (
    CheckpointError,
    Teaching,
    adopt_weights,
    load_drafter,
    require_drafter,
    save_drafter,
    teaching_of,
)
from fovea.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from fovea.drafters.fovea import FoveaDrafter
from fovea.targets.base import RopeSpec, TargetSpec
from fovea.targets.head import TargetHead

TEACHING = Teaching(mid_layers=(1, 2), target_fingerprint="abc")


@pytest.fixture
def saved(tmp_path: Path, make_drafter: Callable[..., FoveaDrafter]) -> tuple[Path, FoveaDrafter]:
    drafter = make_drafter(num_blocks=1, visual_prefix="topk")
    save_drafter(tmp_path, drafter, TEACHING)
    return tmp_path, drafter


@pytest.mark.parametrize("name", ["", "model.safetensors", "config.json"])
def test_round_trip(saved: tuple[Path, FoveaDrafter], name: str, spec: TargetSpec, head: TargetHead) -> None:
    folder, drafter = saved
    loaded = load_drafter(folder / name, head, spec, teaching=TEACHING)
    assert loaded.config == drafter.config
    assert loaded.spec == spec
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[key])
    assert teaching_of(folder) == TEACHING
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_file_holds_the_drafter_alone(saved: tuple[Path, FoveaDrafter]) -> None:
    folder, drafter = saved
    weights = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in weights.values()) == sum(p.numel() for p in drafter.parameters())


def test_retrieval_numbers_may_be_overridden(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead
) -> None:
    folder, drafter = saved
    loaded = load_drafter(folder, head, spec, {"retrieval": {"rho": 0.9}, "max_correction_depth": 0})
    assert loaded.config.retrieval == replace(drafter.config.retrieval, rho=0.9)
    assert loaded.correction.config.rho == 0.9
    assert loaded.correction.max_depth == 0
    with pytest.raises(ValueError, match=r"drafter.retrieval has no setting 'roh'.*rho"):
        load_drafter(folder, head, spec, {"retrieval": {"roh": 0.9}})
    with pytest.raises(ValueError, match="rho"):
        load_drafter(folder, head, spec, {"retrieval": {"rho": 9}})


def test_overrides_that_need_other_weights_are_refused(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead
) -> None:
    folder, _ = saved
    with pytest.raises(CheckpointError, match=r"missing: blocks\.1\..*\. Leave out the drafter\.\* settings that were"):
        load_drafter(folder, head, spec, {"num_blocks": 2})
    with pytest.raises(CheckpointError, match=r"unexpected: correction\.gate"):
        load_drafter(folder, head, spec, {"use_gate": False})
    with pytest.raises(CheckpointError, match=r"depth_embedding \(5, 32\) instead of \(7, 32\)"):
        load_drafter(folder, head, spec, {"depth": 6})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 64}, "hidden_size 32 is 64"),
        ({"vocab_size": 62}, "vocab_size 61 is 62"),
        ({"num_layers": 5}, "num_layers 4 is 5"),
        ({"hidden_size": 64, "vocab_size": 62}, "hidden_size 32 is 64 in this one; vocab_size 61 is 62"),
        ({"rope": RopeSpec(10_000.0)}, "rope"),
    ],
)
def test_another_target_is_refused_by_name(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead, change: dict, named: str
) -> None:
    remedy = r"\. Name its own target, a \w+, with model\.path=<folder>, or train one for this target: python train\.py"
    with pytest.raises(CheckpointError, match=rf"trained for another target: .*{re.escape(named)}.*{remedy}") as error:
        load_drafter(saved[0], head, replace(spec, **change))
    assert "\n" not in str(error.value)


def test_another_teaching_is_refused_by_name(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead
) -> None:
    with pytest.raises(
        CheckpointError, match=r"mid_layers \(1, 2\), not \(1, 2, 3\); set model\.mid_layers=\[1, 2\], or"
    ):
        load_drafter(saved[0], head, spec, teaching=Teaching(mid_layers=(1, 2, 3)))
    weights = r"'abc', not 'xyz'; name the weights .* with model\.path=<folder>, or train one .* train\.py model="
    with pytest.raises(CheckpointError, match=rf"target_fingerprint {weights}"):
        load_drafter(saved[0], head, spec, teaching=Teaching(target_fingerprint="xyz"))


def test_another_processor_is_warned_of_by_name(
    tmp_path: Path,
    make_drafter: Callable[..., FoveaDrafter],
    spec: TargetSpec,
    head: TargetHead,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = {"size.longest_edge": 12_845_056, "resample": 3}
    save_drafter(tmp_path, make_drafter(num_blocks=1), replace(TEACHING, processor=trained))
    load_drafter(tmp_path, head, spec, teaching=Teaching(processor=trained))
    load_drafter(tmp_path, head, spec, teaching=Teaching())
    assert not caplog.records
    load_drafter(tmp_path, head, spec, teaching=Teaching(processor={**trained, "size.longest_edge": 50_176}))
    assert "size.longest_edge was 12845056 and is 50176. Answers stay exact" in caplog.text
    assert "resample" not in caplog.text


def test_what_a_checkpoint_does_not_say_is_not_compared(
    tmp_path: Path, make_drafter: Callable[..., FoveaDrafter], spec: TargetSpec, head: TargetHead
) -> None:
    save_drafter(tmp_path, make_drafter(num_blocks=1))
    load_drafter(tmp_path, head, spec, teaching=TEACHING)


@pytest.mark.parametrize("written_by", ["this version", "an older one"])
def test_a_drafter_reads_the_layers_that_it_was_trained_on(
    written_by: str, tmp_path: Path, spec: TargetSpec, head: TargetHead
) -> None:
    """Two layers have the weights' shapes of any two others."""

    def reading(layers: tuple[int, ...] | None) -> Eagle3Drafter:
        return Eagle3Drafter(spec, Eagle3Config(depth=2, draft_vocabulary=None, feature_layers=layers), head)

    save_drafter(tmp_path, reading(None))
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["feature_layers"] == [1, 2]
    if written_by == "an older one":
        del record["feature_layers"], record["crc"]
        (tmp_path / "config.json").write_text(json.dumps(record))
    assert load_drafter(tmp_path, head, spec, {"feature_layers": [1, 2]}).feature_layers == (1, 2)
    adopt_weights(reading((1, 2)), tmp_path)
    for others in ((1, 3), (2, 1)):
        named = rf"layers \[1, 2\] .* read those of \[{others[0]}, {others[1]}\]; set drafter\.feature_layers=\[1, 2\]"
        with pytest.raises(CheckpointError, match=named):
            load_drafter(tmp_path, head, spec, {"feature_layers": list(others)})
        with pytest.raises(CheckpointError, match=named):
            adopt_weights(reading(others), tmp_path)


def test_another_choice_of_layers_by_default_is_refused(tmp_path: Path, spec: TargetSpec, head: TargetHead) -> None:
    """What "null" stands for is that of the version which trained the drafter."""
    save_drafter(tmp_path, Eagle3Drafter(spec, Eagle3Config(depth=2, draft_vocabulary=None), head))
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["config"]["feature_layers"] is None
    (tmp_path / "config.json").write_text(json.dumps({**record, "feature_layers": [2, 3], "crc": None}))
    with pytest.raises(CheckpointError, match=r"layers \[2, 3\] of its target and would read those of \[1, 2\]"):
        load_drafter(tmp_path, head, spec)


def test_weights_that_do_not_fit_are_named(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead
) -> None:
    folder, _ = saved
    weights = load_file(folder / "model.safetensors")
    weights["surplus.bias"] = weights.pop("fc.bias")
    weights["norm.weight"] = torch.ones(5)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: fc\.bias; unexpected: surplus\.bias; .*norm\.weight \(5,\)"):
        load_drafter(folder, head, spec)


def test_absent_checkpoints_and_unknown_drafters_are_named(
    saved: tuple[Path, FoveaDrafter], spec: TargetSpec, head: TargetHead, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.*config\.json"):
        load_drafter(tmp_path / "nowhere" / "x", head, spec)
    folder, _ = saved
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, "drafter": "other", "crc": None}))
    with pytest.raises(ValueError, match=r"'other'.*fovea"):
        load_drafter(folder, head, spec)


def test_weights_are_adopted_whatever_the_settings_that_they_do_not_depend_on(
    saved: tuple[Path, FoveaDrafter], make_drafter: Callable[..., FoveaDrafter]
) -> None:
    folder, drafter = saved
    other = make_drafter(seed=5, num_blocks=1, visual_prefix="none", recursion="corrected")
    adopt_weights(other, folder, "abc")
    assert other.config.visual_prefix == "none"
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(CheckpointError, match=r"missing: blocks\.1\."):
        adopt_weights(make_drafter(num_blocks=2), folder)


def test_weights_of_another_drafter_or_target_are_not_adopted(
    saved: tuple[Path, FoveaDrafter], make_drafter: Callable[..., FoveaDrafter], spec: TargetSpec, tmp_path: Path
) -> None:
    folder, _ = saved
    require_drafter(folder, "fovea")
    with pytest.raises(CheckpointError, match=r"is a 'fovea' and not a 'vispec'; choose drafter=fovea"):
        require_drafter(folder / "model.safetensors", "vispec")
    with pytest.raises(CheckpointError, match="num_layers 4 is 5"):
        adopt_weights(make_drafter(replace(spec, num_layers=5), num_blocks=1), folder)
    with pytest.raises(CheckpointError, match=r"target_fingerprint 'abc', not 'xyz'"):
        adopt_weights(make_drafter(num_blocks=1), folder, "xyz")
    with pytest.raises(FileNotFoundError, match=r"no drafter checkpoint at .*nowhere"):
        require_drafter(tmp_path / "nowhere" / "drafter", "fovea")
