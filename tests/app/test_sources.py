"""Which prompts a job asks, and where the data lie that its drafter was trained on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from callbacks.origin import CONFIG, TRAINED_ON, lineage
from fovea.app import assemble, sources
from fovea.app.errors import is_user_error
from fovea.app.launch import CONFIG_DIR
from fovea.app.settings import read_settings
from fovea.drafters.checkpoint import CONFIG_FILE


def composed(*overrides, name="evaluate"):
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=[*overrides, "paths.output_dir=/run"])


@pytest.fixture
def mixture(tmp_path):
    """A file of three conversations, and the manifest of a mixture that trains on the second."""
    lines = [{"key": key, "messages": [{"role": "user", "content": "What?"}]} for key in "abc"]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/train.jsonl").write_text(json.dumps({"key": "b", "ids": ["b"], "images": []}))
    (tmp_path / "train.jsonl").write_text(json.dumps(lines[1]))
    return tmp_path


def test_what_a_training_has_seen_is_left_out(mixture):
    typed = ["benchmark=jsonl", f"benchmark.path={mixture / 'asked.jsonl'}"]
    assert [item.key for item in sources.prompts(composed(*typed))] == ["a", "b", "c"]
    exclude = f"benchmark.exclude={mixture}"
    assert [item.key for item in sources.prompts(composed(*typed, exclude))] == ["a", "c"]
    with pytest.raises(ValueError, match="is neither a training mixture nor a folder") as told:
        sources.prompts(composed(*typed, f"benchmark.exclude={mixture / 'manifests'}"))
    assert is_user_error(told.value)


def drafter(folder, **origin):
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({"drafter": "fovea", "config": {}, "origin": origin}))
    return folder


def test_a_drafter_says_what_it_was_trained_on(mixture):
    record = drafter(mixture / "told", **{TRAINED_ON: "/mix/train.jsonl"})
    assert sources.trained_on(composed(), record) == "/mix/train.jsonl"
    assert sources.trained_on(composed(), record / "drafter.safetensors") == "/mix/train.jsonl"
    ours = ["data=jsonl", f"data.path={mixture / 'train.jsonl'}"]
    # One that does not say it may lie in a run whose settings do.
    assert sources.trained_on(composed(*ours), drafter(mixture / "silent")) == str(mixture / "train.jsonl")
    assert sources.trained_on(composed(*ours), None) is None  # a method without weights
    assert sources.trained_on(composed(*ours, name="train"), None) == str(mixture / "train.jsonl")
    assert sources.trained_on(composed(name="train"), None) is None
    finished = ["data=jsonl", f"data.train={mixture}"]
    assert sources.trained_on(composed(*finished, name="train"), None) == str(mixture)


def test_the_run_tells_its_drafter(tmp_path):
    trainer: Any = SimpleNamespace(datamodule=None)
    assert TRAINED_ON not in lineage(tmp_path, trainer)
    (tmp_path / CONFIG).write_text(yaml.safe_dump({"data": {"train": {"path": "/mix/train.jsonl"}}}))
    assert lineage(tmp_path, trainer)[TRAINED_ON] == "/mix/train.jsonl"
    (tmp_path / CONFIG).write_text(yaml.safe_dump({"data": {"train": {"split": "train"}}}))
    assert TRAINED_ON not in lineage(tmp_path, trainer)


def test_an_evaluation_tells_of_prompts_that_were_trained_on(mixture, small_target_path, caplog):
    typed = ["benchmark=jsonl", f"benchmark.path={mixture / 'asked.jsonl'}", "data=jsonl"]
    record = drafter(mixture / "told", **{TRAINED_ON: str(mixture / "train.jsonl")})

    def told(*more, checkpoint=record):
        cfg = composed(*typed, *more)
        job = assemble.Job(cfg, read_settings(cfg), torch.device("cpu"), mixture / "run")
        caplog.clear()
        settings = assemble.make_evaluation(job, small_target_path, checkpoint).settings
        return settings.get("benchmark_trained_on"), [m for m in caplog.messages if "trained on" in m]

    count, (message,) = told()
    assert count == 1
    assert message.startswith("1 of the 3 prompts of jsonl, the first 'b'")
    assert told(f"benchmark.exclude={mixture}") == (None, [])
    assert told(checkpoint=None) == (None, [])
