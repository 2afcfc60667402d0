"""What trackers are told of a job's settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from fovea.app.launch import CONFIG_DIR
from fovea.app.tracking import log_settings


class Recorder:
    """A logger that keeps what it is given."""

    def log_hyperparams(self, settings: dict[str, Any]) -> None:
        self.settings = settings


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_settings_are_plain_and_tell_no_folder_of_this_machine(name):
    typed = ["seed=5", "drafter.retrieval.rho=0.6", "paths.output_dir=/home/me/run", "paths.cache=/home/me/cache"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose(name, overrides=typed)
    recorder = Recorder()
    log_settings([recorder], cfg)  # type: ignore[list-item]
    written = json.dumps(recorder.settings)  # which takes plain types alone
    assert "/home/me" not in written
    assert "${" not in written
    assert (recorder.settings["seed"], recorder.settings["drafter"]["retrieval"]["rho"]) == (5, 0.6)
    assert recorder.settings["trainer"]["default_root_dir"] == "<output_dir>"
    assert not {"paths", "logger"} & recorder.settings.keys()
    assert cfg.paths.output_dir == "/home/me/run", "the job itself still knows"
