"""The commands of docs/clusters.md compose, and its script for SLURM does what it says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from fovea.app.launch import CONFIG_DIR, missing_extras
from fovea.app.settings import read_settings
from fovea.artifacts.command import _parser

PAGE = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)[1]  # type: ignore[index]
#: Commands of the page, one string each.
COMMANDS = [
    shlex.join(shlex.split(line, comments=True))
    for block in (*re.findall(r"(?:^    .*\n)+", PAGE, flags=re.MULTILINE), SCRIPT)
    for line in block.replace("\\\n", " ").splitlines()
    if re.search(r"(train|evaluate)\.py|fovea\.artifacts\.export", line)
]


def first_job(words: list[str]) -> list[str]:
    """Overrides of the first job of a sweep."""
    parsed = OverridesParser.create().parse_overrides(words)
    return [
        f"{o.key_or_group}={next(o.sweep_string_iterator())}" if o.is_sweep_override() else str(o.input_line)
        for o in parsed
    ]


def test_there_are_commands():
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", [c for c in COMMANDS if ".py" in c])
def test_a_command_composes(command):
    script, typed = re.search(r"(train|evaluate)\.py (.*)", command).groups()  # type: ignore[union-attr]
    overrides = [word for word in shlex.split(typed) if word not in ("-m", "&")]
    if missing := missing_extras(overrides):
        pytest.skip(missing[0])
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose(script, overrides=[*first_job(overrides), "paths.output_dir=/run"])
    read_settings(cfg)
    processes = re.search(r"--nproc-per-node (\d+)", command)
    if processes:
        assert cfg.trainer.devices == int(processes[1])
        assert cfg.trainer.num_nodes == int((re.search(r"--nnodes (\d+)", command) or ["", "1"])[1])
        assert "hydra.run.dir=" in command


@pytest.mark.parametrize("command", [c for c in COMMANDS if "artifacts.export" in c])
def test_an_export_is_read(command):
    options = _parser().parse_args(shlex.split(command.split("fovea.artifacts.export", 1)[1]))
    assert options.data[0] == "datamodules.conversations:JsonlConversations"


def test_no_task_waits_for_one_that_is_gone():
    started = re.findall(r"^ *srun (.*)", PAGE, flags=re.MULTILINE)
    assert len(started) > 1
    assert all("--kill-on-bad-exit=1" in words for words in started)


def submit(folder: Path, **does: str) -> subprocess.Popen:
    """The script, started in ``folder`` with stand-ins for SLURM's commands, each of which does what is told of it."""
    for name, line in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(SCRIPT)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=env, start_new_session=True)


@pytest.mark.parametrize("code", [0, 3])
def test_the_script_ends_as_its_tasks_have_ended(tmp_path, code):
    """Else SLURM takes a failed job for a completed one, and starts what waits for its success."""
    assert submit(tmp_path, srun=f"sleep 0.2; exit {code}").wait(30) == code


def test_the_script_queues_its_job_again(tmp_path):
    """With an srun that works until it is ended, and an scontrol that notes what it is told."""
    job = submit(tmp_path, srun='echo "$@" > started; exec sleep 60', scontrol='echo "$@" > told')
    try:
        for name in ("started", "told"):
            deadline = time.monotonic() + 30
            while not (tmp_path / name).is_file() and time.monotonic() < deadline:
                time.sleep(0.05)
            if name == "started":
                time.sleep(0.2)
                job.send_signal(signal.SIGUSR1)
        assert "resume=own" in (tmp_path / "started").read_text()
        assert "hydra.run.dir=outputs/slurm-17" in (tmp_path / "started").read_text()
        assert (tmp_path / "told").read_text() == "requeue 17\n"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    tasks, gpus = (re.search(rf"--{name}-per-node=(\d+)", SCRIPT)[1] for name in ("ntasks", "gpus"))  # type: ignore[index]
    assert f"trainer.devices={tasks}" in SCRIPT
    assert tasks == gpus
