"""Where a target lies, for commands that take a folder."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from fovea.app.target_folder import main
from fovea.app.targets import name_target


def test_the_folder_alone_is_printed(small_target_path, capsys):
    main([f"model.path={small_target_path}"])
    assert capsys.readouterr().out == f"{small_target_path}\n"


def test_what_is_built_is_built_once_and_talks_elsewhere(tmp_path, monkeypatch, capsys):
    calls = []

    def build(recipe, cache):
        print("building")
        calls.append(cache)
        return cache / "targets" / "one"

    monkeypatch.setattr("fovea.targets.smollm.SmolLM2Config.build", build)
    main(["model=smollm2", f"paths.cache={tmp_path}"])
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{tmp_path / 'targets' / 'one'}\n", "building\n")
    assert calls == [tmp_path]


@pytest.mark.parametrize(
    ("path", "folder", "name"),
    [
        (None, "targets/tiny-0123", {"target_name": "tiny"}),
        ("given", "home/me/my-7b", {"target_name": "my-7b"}),
        (None, "hub/models--Qwen--Q-7B/snapshots/cc59", {"target_name": "Qwen/Q-7B", "target_revision": "cc59"}),
        ("given", "hub/models--Qwen--Q-7B/snapshots/cc59", {"target_name": "Qwen/Q-7B", "target_revision": "cc59"}),
    ],
)
def test_what_results_call_a_target_tells_no_more_of_its_path(tmp_path, path, folder, name):
    assert name_target(OmegaConf.create({"name": "tiny", "path": path}), tmp_path / folder) == name


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["model=qwen25vl"], "not in the local hub cache; point to a local copy with model.path="),
        (["model=smollm"], "smollm2"),
        (["model.path=/nowhere"], "/nowhere"),
        (["model.dtype=half"], "choose from: float32"),
        (["modle=smollm2"], "did you mean 'model'"),
    ],
)
def test_what_is_wrong_is_said_in_words(words, why):
    with pytest.raises(SystemExit, match=r"^error: ") as stop:
        main(words)
    assert why in str(stop.value)
