"""Campaigns over entry points that only pretend: what is run, what is kept, and what a change or a failure does."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fovea.app.launch import CONFIG_DIR
from fovea.app.runs import LAST_CHECKPOINT
from fovea.campaign import jobs, keys, runner
from fovea.campaign.command import count, default_checkpoints, ended_by_signals
from fovea.campaign.jobs import BEGUN, RECORD, Job, JobError, read_record
from fovea.campaign.pace import Pace
from fovea.campaign.plan import Measurement, Stage, Training, trainings_of
from fovea.campaign.runner import Campaign, Options
from fovea.campaign.stages import evidence, method_stage, methods, training
from fovea.campaign.summary import commands, listing, shown_folders, track, write_summary
from fovea.evaluation.page.published_table import read

#: Appends its command line to a log, fails where a file says so, and otherwise ends as an entry point does.
SCRIPT = """
import json, sys
from pathlib import Path
here = Path(__file__).parent
folder = Path(next(a for a in sys.argv if a.startswith("hydra.run.dir=")).split("=", 1)[1])
with (here / "log").open("a") as log:
    log.write(json.dumps([Path(__file__).name, *sys.argv[1:]]) + chr(10))
fails = here / "fails"
broken = fails.is_file() and fails.read_text() in " ".join(sys.argv)
outcome = {"overrides": [], "status": "failed" if broken else "completed", "metrics": {"tau": 2.5}, "error": "no luck"}
(folder / "outcome.json").write_text(json.dumps(outcome))
sys.exit(int(broken))
"""
#: Holds a lock for a while.
HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(1.5)
"""
ONE, TWO = Training("one", ("eaglevlm",)), Training("two", ("vispec", "vispec_stage2"))
STAGES = [
    Stage("first", "a stage", (Measurement("a", (), ONE), Measurement("b", ("drafter.rope=1d",), ONE))),
    Stage("second", "another", (Measurement("a", ("method=vispec",), TWO), Measurement("pld", ("method=pld",)))),
]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Where the entry points are."""
    folder = tmp_path / "root"
    folder.mkdir()
    for name in ("train.py", "evaluate.py"):
        (folder / name).write_text(SCRIPT)
    monkeypatch.setattr(jobs, "ROOT", folder)
    monkeypatch.setattr(runner, "settings_digest", quick_digest)
    return folder


def quick_digest(config_name: str, overrides: Sequence[str], *made_from: str) -> str:
    """The key of settings without composing them."""
    counts = [one for one in overrides if not one.startswith(("name=", "ckpt=", "init_from="))]
    return hashlib.sha256(json.dumps([config_name, counts, *made_from]).encode()).hexdigest()[:12]


def called(root: Path) -> list[list[str]]:
    """What was run since the last time."""
    log = root / "log"
    lines = log.read_text().splitlines() if log.is_file() else []
    log.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]


def campaign(tmp_path: Path, *overrides: str, **options) -> Campaign:
    return Campaign(STAGES, Options(tmp_path / "out", tmp_path / "drafters", overrides, **options))


def test_drafters_are_trained_once_and_nothing_is_done_twice(root, tmp_path, capsys):
    report = campaign(tmp_path, prompts=3).run()
    assert not report.failed
    runs = called(root)
    assert [run[0] for run in runs] == ["train.py", *["evaluate.py"] * 2, *["train.py"] * 2, *["evaluate.py"] * 2]
    first, second = (run for run in runs if run[0] == "train.py" and "name=two" in run)
    stage = next(word for word in first if word.startswith("hydra.run.dir="))
    assert stage.replace("hydra.run.dir", "init_from") in second
    assert {"experiment=vispec_stage2", "speed_eval=off", "logger=csv", "page=off"} <= set(second)
    measured = [run for run in runs if run[0] == "evaluate.py"]
    assert all("speed.prompts=3" in run for run in measured)
    assert f"ckpt={report.trained[0]}" in measured[0]
    assert not any(word.startswith("ckpt=") for word in measured[-1]), "a method without weights"
    recorded = json.loads((report.trained[-1] / "training.json").read_text())
    assert recorded["stages"] == ["vispec", "vispec_stage2"]
    assert recorded["seconds"] == pytest.approx(sum(read_record(path).seconds for path in report.trained[1:]))
    assert "7 runs to do" in capsys.readouterr().out

    again = campaign(tmp_path, prompts=3).run()
    assert called(root) == []
    assert (len(again.kept), again.trained, again.measured, again.older) == (7, [], [], [])


def test_drafters_can_be_trained_alone_and_measured_later(root, tmp_path, capsys):
    own = Stage("third", "measures itself", runs=(Training("three", ("specvlm",), measured=True),))
    one = Campaign([*STAGES, own], Options(tmp_path / "out", tmp_path / "drafters"))
    report = one.train()
    assert [run[0] for run in called(root)] == ["train.py"] * 3
    assert (len(report.trained), report.measured) == (3, [])
    assert "3 runs to do" in capsys.readouterr().out
    assert len(Campaign([*STAGES, own], one.options).run().measured) == 4
    assert [run[0] for run in called(root)] == [*["evaluate.py"] * 4, "train.py"]


@pytest.mark.parametrize("changed", ["nothing", "code", "note"])
def test_a_killed_job_goes_on_with_what_it_has_left_of_itself(root, tmp_path, monkeypatch, changed):
    report = campaign(tmp_path).run()
    called(root)
    folder = report.measured[1]
    (folder / RECORD).unlink()  # the last that a job writes
    (folder / "half").write_text("")
    if changed == "code":
        monkeypatch.setattr(runner, "code_digest", lambda folders: "other")
    if changed == "note":
        (folder / BEGUN).write_text("{")
    again = campaign(tmp_path).run()
    assert folder in again.measured
    assert json.loads((folder / "outcome.json").read_text())["status"] == "completed"
    assert (folder / "half").exists() == (changed == "nothing"), "begun by other code, or nobody knows by which"


def test_a_killed_training_resumes_and_counts_the_time_of_what_it_keeps(root, tmp_path):
    first = campaign(tmp_path).run()
    folder = first.trained[0]
    assert all("resume=own" in run for run in called(root) if run[0] == "train.py")
    (folder / RECORD).unlink()
    begun = json.loads((folder / BEGUN).read_text())
    (folder / LAST_CHECKPOINT).parent.mkdir()
    (folder / LAST_CHECKPOINT).touch()
    os.utime(folder / LAST_CHECKPOINT, (begun["at"] + 500.0,) * 2)
    again = campaign(tmp_path).run()
    assert again.trained == [folder]
    assert 500.0 < read_record(folder).seconds < 560.0
    (folder / RECORD).unlink()
    os.utime(folder / LAST_CHECKPOINT, (begun["at"],) * 2)  # killed once more, before it had a later checkpoint
    campaign(tmp_path).run()
    assert 500.0 < read_record(folder).seconds < 560.0


def test_other_settings_are_other_drafters_and_new_measurements(root, tmp_path):
    first = campaign(tmp_path).run()
    called(root)
    other = campaign(tmp_path, "optimizer.weight_decay=0.5").run()
    assert len(called(root)) == 7
    assert not set(other.trained) & set(first.trained)
    assert all(path.is_dir() for path in first.trained), "both are kept"
    assert other.measured == first.measured
    back = campaign(tmp_path).run()
    assert (back.trained, len(back.measured)) == ([], 4)
    called(root)
    more = campaign(tmp_path, prompts=5).run()
    assert (more.trained, len(more.measured)) == ([], 4)


def test_without_keys_a_drafter_of_other_settings_is_replaced(root, tmp_path):
    assert campaign(tmp_path, keyed=False).run().trained[0] == tmp_path / "drafters" / "one"
    other = campaign(tmp_path, "optimizer.weight_decay=0.5", keyed=False).run()
    assert other.trained[0] == tmp_path / "drafters" / "one"
    assert "optimizer.weight_decay=0.5" in read_record(other.trained[0]).command


def test_other_code_measures_anew_and_keeps_drafters_unless_told(root, tmp_path, monkeypatch):
    first = campaign(tmp_path).run()
    monkeypatch.setattr(runner, "code_digest", lambda folders: "other")
    second = campaign(tmp_path).run()
    assert (second.trained, second.measured, second.older) == ([], first.measured, ["one", "two", "two"])
    words = write_summary(campaign(tmp_path))
    assert "0 of 3 drafters were trained in this call" in words
    called(root)
    third = campaign(tmp_path, retrain=True).run()
    assert third.trained == first.trained
    assert len(third.measured) == 3, "what has no drafter is as it was"


def test_a_failure_lets_the_others_run_and_is_tried_again(root, tmp_path, capsys):
    (root / "fails").write_text("name=two")
    broken = campaign(tmp_path)
    report = broken.run()
    assert set(report.failed) == {"train two", "second/a"}
    assert "no luck" in report.failed["train two"]
    assert "console.log" in report.failed["train two"]
    assert [path.name for path in report.measured] == ["a", "b", "pld"]
    words = write_summary(broken)
    assert "FAILED second/a: its drafter, two, could not be trained" in words
    assert "3 of 4 measurements were made in this call" in words
    content = json.loads((tmp_path / "out" / "evidence.json").read_text())
    assert content["failed"] == report.failed
    assert [one["name"] for one in content["measured"] if "metrics" not in one] == ["second/a"]
    (root / "fails").unlink()
    called(root)
    again = campaign(tmp_path).run()
    assert not again.failed
    assert [run[0] for run in called(root)] == ["train.py", "train.py", "evaluate.py"]


def test_the_page_is_made_of_the_stages_that_have_a_measurement(root, tmp_path):
    own = [str(tmp_path / "out" / stage.name) for stage in STAGES]
    (root / "fails").write_text("name=one")
    broken = campaign(tmp_path)
    assert shown_folders(broken, measured=True) == []
    broken.run()
    assert shown_folders(broken) == own
    assert shown_folders(broken, measured=True) == own[1:], "a page over the first stage would be refused"


def test_two_calls_do_not_write_into_one_folder(root, tmp_path, capfd):
    folder = tmp_path / "out" / "a"
    job = Job("evaluate.py", (), folder, "s", "c")
    folder.parent.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder.parent / ".a.lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    start = time.perf_counter()
    job.run(shown=False)
    assert time.perf_counter() - start > 1
    assert "is being written by another call; waiting" in capfd.readouterr().out
    holder.wait()
    assert len(called(root)) == 1
    assert job.run(shown=False) == read_record(folder), "what the other call has finished is not done again"
    assert called(root) == []
    with (folder.parent / ".a.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_at_work_too(root, tmp_path, capsys, number):
    said = tmp_path / "pid"
    (root / "evaluate.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # a terminal would interrupt both
        f"at = pathlib.Path({str(said)!r})\n"
        "at.with_suffix('.new').write_text(str(os.getpid()))\n"
        "at.with_suffix('.new').rename(at)\n"
        "time.sleep(300)\n"
    )

    def send() -> None:
        while not said.is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(SystemExit, match="130"), ended_by_signals():
        Job("evaluate.py", (), tmp_path / "job", "s", "c").run(shown=False)
    assert "the same command goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
    _, status = os.waitpid(int(said.read_text()), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_job_that_ends_badly_without_a_word(root, tmp_path):
    (root / "evaluate.py").write_text("raise SystemExit(3)")
    with pytest.raises(JobError, match=r"evaluate\.py ended with 3"):
        Job("evaluate.py", (), tmp_path / "job", "s", "c").run(shown=True)
    assert read_record(tmp_path / "job") is None


def test_every_command_is_kept_and_can_be_repeated(root, tmp_path):
    one = campaign(tmp_path, "speed.warmup_prompts=0")
    text = commands(one, ["folder with space", "--out", "page.html"])
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert [words[1] for words in lines if words].count("train.py") == 3
    assert lines[-1] == ["python", "-m", "fovea.evaluation.report", "folder with space", "--out", "page.html"]
    assert all("speed.warmup_prompts=0" in words for words in lines[:-1] if words)


def test_another_logger_takes_the_place_of_the_files_and_changes_no_key(root, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "settings_digest", keys.settings_digest)
    plain, tracked = campaign(tmp_path), campaign(tmp_path, "logger=wandb_offline", "logger.wandb.project=mine")
    for one, logger in ((plain, "logger=csv"), (tracked, "logger=wandb_offline")):
        jobs = [*one.jobs_of(ONE), one.job_of(STAGES[0], STAGES[0].measurements[0])]
        assert all([word for word in job.overrides if word.startswith("logger=")] == [logger] for job in jobs)
    assert plain.jobs_of(ONE)[0].settings == tracked.jobs_of(ONE)[0].settings
    assert plain.jobs_of(ONE)[0].folder == tracked.jobs_of(ONE)[0].folder


def test_a_tracked_campaign_tells_of_its_page(root, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fovea.app.tracking.log_sweep", lambda *given: told.append(given))
    shown = [tmp_path / "out" / "first", tmp_path / "never measured"]
    shown[0].mkdir(parents=True)
    track(campaign(tmp_path), shown)
    assert told == []
    track(campaign(tmp_path, "logger=wandb_offline", "logger.wandb.project=mine"), shown)
    ((cfg, folder, rows, found),) = told
    assert (cfg.logger.wandb.project, folder, found) == ("mine", tmp_path / "out", shown[:1])
    assert [row[0] for row in rows] == ["run", "first/a", "first/b", "second/a", "second/pld"]


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_counts_below_one_are_refused(text, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=count)
    assert parser.parse_args(["--prompts", "7"]).prompts == 7
    with pytest.raises(SystemExit):
        parser.parse_args([f"--prompts={text}"])
    assert f"'{text}' is no count; give a whole number of 1 or more" in capsys.readouterr().err


def test_epochs_are_shared_by_the_stages_of_a_training(root, tmp_path):
    epochs = [
        next(word for word in job.overrides if word.startswith("model.recipe.epochs="))
        for made in (ONE, TWO)
        for job in campaign(tmp_path, epochs=3).jobs_of(made)
    ]
    assert [int(word.partition("=")[2]) for word in epochs] == [3, 1, 2]


def test_settings_without_places_and_names_make_the_key():
    def key(*overrides: str) -> str:
        return keys.settings_digest("train", ["experiment=eaglevlm", "speed_eval=off", *overrides])

    same = key("name=other", "paths.cache=/elsewhere", "logger=csv", "speed.prompts=3")
    assert same == key() != key("optimizer.lr=0.5")
    loader = ("threads=3", "checksums=once", "retries=9", "timeout=5")
    assert same == key("data.export.writer=process", *(f"data.loader.{word}" for word in loader))
    assert same != key("data.loader.batch_size=3")
    measured = keys.settings_digest("train", ["experiment=eaglevlm"])
    assert measured != keys.settings_digest("train", ["experiment=eaglevlm", "speed.prompts=3"])
    assert keys.settings_digest("evaluate", [], "a") != keys.settings_digest("evaluate", [], "b")


def test_the_code_key_sees_code_and_not_what_shows_figures(tmp_path):
    (tmp_path / "part" / "page").mkdir(parents=True)

    def key() -> str:
        keys.code_digest.cache_clear()
        return keys.code_digest(("part",), tmp_path)

    empty = key()
    for name in ("page/look.py", "plots.py", "words.md"):
        (tmp_path / "part" / name).write_text("1")
    assert key() == empty
    (tmp_path / "part" / "work.py").write_text("1")
    one = key()
    assert one != empty
    (tmp_path / "part" / "work.py").write_text("2")
    assert key() not in (one, empty)
    for folder in (*keys.TRAINING_CODE, *keys.MEASURING_CODE):
        assert (keys.ROOT / folder).is_dir(), folder


def test_the_pace_of_what_was_done_is_that_of_the_rest():
    pace = Pace()
    pace.add("train", [100.0, 100.0])
    pace.add("measure", [10.0, 30.0])
    assert (pace.remaining(), pace.place()) == (240.0, "1/4")
    pace.done("train", 100.0, 200.0)
    assert (pace.remaining(), pace.place(), pace.left) == (200.0 + 40.0, "2/4", 3)
    pace.done("measure", 10.0, 5.0)
    assert pace.remaining() == 200.0 + 15.0


def test_a_job_that_makes_what_all_need_does_not_set_the_pace():
    pace = Pace()
    pace.add("train", [60.0] * 10)
    pace.done("train", 60.0, 1080.0)
    for _ in range(2):
        pace.done("train", 60.0, 66.0)
    assert pace.remaining() == pytest.approx(7 * 66.0)


def test_the_evidence_has_every_method_and_every_ablation_and_its_settings_compose(tmp_path):
    stages = evidence()
    by_name = {stage.name: stage for stage in stages}
    assert [m.name for m in by_name["methods"].measurements] == methods()
    ablations = {path.stem for path in (CONFIG_DIR / "experiment" / "ablation").glob("*.yaml")}
    assert {m.name for m in by_name["ablations"].measurements} == ablations | {"fovea"}
    assert training("pld") is None
    assert training("vispec") == replace(TWO, name="vispec", seconds=70)
    one = Campaign(stages, Options(tmp_path, tmp_path))
    for name in ("controls", "budgets", "trees"):
        last = by_name[name].measurements[-1]
        assert one.job_of(by_name[name], last).folder == tmp_path / name / last.name
    assert "speed_eval=off" not in one.jobs_of(by_name["epochs"].runs[0])[0].overrides
    branches = by_name["branches"].measurements
    assert [m.name for m in branches[:2] + branches[-1:]] == ["prune_2", "prune_3", "resampler_10"]
    paper = [(row["branch"], row["ratio"]) for row in read("specvlm_table4_branches")]
    assert [tuple(m.name.split("_")) for m in branches] == paper
    job = one.jobs_of(branches[-1].training)[0]
    assert {"drafter.compression.mode=resampler", "drafter.compression.queries=10"} <= set(job.overrides)
    rows = listing(stages, prompts=8)
    assert rows[-1][1] == str(sum(len(stage.measurements) for stage in stages))
    assert rows[-1][4] == str(len(trainings_of(stages)))
    assert {row[2] for row in rows[1:-1]} == {"8"}
    assert [m.name for m in method_stage(["pld"]).measurements] == ["pld"]


def test_drafters_lie_in_the_cache_of_the_settings(tmp_path):
    assert default_checkpoints([f"paths.cache={tmp_path}"]) == tmp_path / "drafters"
