"""``last.ckpt`` flipped, cut and made up: refused by name with a remedy, or what was written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callbacks.checkpoint_files import CheckpointFiles
from fovea.app.resumable import require_checkpoint
from fovea.app.typed import SettingError
from tests.artifacts.test_damage import JSON, QUIET
from tests.drafters.test_damage import damaged

REMEDY = "copy it again, resume an earlier run, or start from its exported drafter with init_from"


def fit_loop() -> dict[str, Any]:
    """As Lightning keeps it."""
    counters = {"ready": 4, "started": 4, "processed": 4, "completed": 3}
    progress = {"total": counters, "current": counters}
    return {
        "state_dict": {"combined_loader": [{"epoch": 1, "taken": 8, "length": 20}]},
        "epoch_progress": progress,
        "epoch_loop.batch_progress": progress | {"is_last_batch": False},
    }


def content() -> dict[str, Any]:
    """Of the form that a training leaves."""
    draw = torch.Generator().manual_seed(0)
    weights = {f"drafter.{name}": torch.randn(3, 5, generator=draw) for name in "ab"}
    moments = {number: {"exp_avg": torch.randn(3, 5, generator=draw)} for number in range(2)}
    return {
        "state_dict": weights,
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
        "lr_schedulers": [{"last_epoch": 4}],
        "loops": {"fit_loop": fit_loop()},
        "callbacks": {"DrafterCheckpoint": {"best_score": 0.5}},
        "global_step": 4,
        "micro_batch": 8,
        "drafter": {"name": "fovea", "target": {"layers": 4}, "teaching": {"mid_layers": [1, 2]}, "reads": {}},
        "pytorch-lightning_version": "2.0.0",
    }


def plain(value: Any) -> Any:
    """``value`` with the bits of its tensors, to be compared."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, value.numpy().tobytes()
    return [plain(item) for item in value] if isinstance(value, list) else value


def refused(path: Path) -> str | None:
    try:
        require_checkpoint(path)
    except SettingError as error:
        return str(error)
    return None


@pytest.fixture
def path(tmp_path) -> Path:
    CheckpointFiles().save_checkpoint(content(), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@QUIET
@given(data=st.data())
def test_damage_is_named_or_means_nothing(path, data):
    whole = path.read_bytes()
    try:
        path.write_bytes(damaged(data.draw, whole))
        if (said := refused(path)) is None:
            assert plain(torch.load(path, weights_only=True)) == plain(content())
        else:
            assert said.startswith(str(path))
            assert said.endswith(REMEDY)
    finally:
        path.write_bytes(whole)


@QUIET
@given(raw=st.binary(max_size=300) | JSON.map(lambda value: _saved(value)))
def test_what_is_no_checkpoint(path, raw):
    path.write_bytes(raw)
    said = refused(path)
    assert said is not None
    assert said.startswith(str(path))
    assert said.endswith(REMEDY)


@QUIET
@given(data=st.data())
def test_anything_in_the_place_of_what_is_kept(path, data):
    """An archive that is whole, of something else."""
    kept = content()
    name = data.draw(st.sampled_from(sorted(set(kept) - {"pytorch-lightning_version"})))
    kept[name] = data.draw(JSON)
    path.write_bytes(_saved(kept))
    said = refused(path)
    if said is None:  # a number for a number, or an empty list
        assert type(kept[name]) is type(content()[name])
    else:
        assert said == f"{path} is no checkpoint of a training: {name} cannot be used; {REMEDY}"


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_whole_one_is_taken(path):
    assert refused(path) is None


@pytest.mark.parametrize(
    "loops",
    [
        {},
        {"fit_loop": {}},
        {"validate_loop": fit_loop()},
        *({"fit_loop": {key: part for key, part in fit_loop().items() if key != lacking}} for lacking in fit_loop()),
        {"fit_loop": fit_loop() | {"state_dict": {"combined_loader": [3]}}},
        {"fit_loop": fit_loop() | {"state_dict": {"combined_loader": {}}}},
        {"fit_loop": fit_loop() | {"epoch_progress": {"total": {}, "current": {}}}},
        {"fit_loop": fit_loop() | {"epoch_progress": {"total": fit_loop()["epoch_progress"]["total"], "current": []}}},
        {"fit_loop": fit_loop() | {"epoch_loop.batch_progress": 3}},
    ],
)
def test_loops_that_do_not_say_how_far_a_training_came(tmp_path, loops):
    torch.save(content() | {"loops": loops}, tmp_path / "last.ckpt")
    said = refused(tmp_path / "last.ckpt")
    assert said is not None
    assert "loops cannot be used" in said
    torch.save(content(), tmp_path / "last.ckpt")
    assert refused(tmp_path / "last.ckpt") is None
