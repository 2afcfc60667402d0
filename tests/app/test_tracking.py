"""What trackers are told of a job's settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fovea.app import tracking
from fovea.app.launch import CONFIG_DIR
from fovea.app.sweep import write_sweep_page
from fovea.app.tracked import budget_tables, figures_table
from fovea.app.tracking import log_result, log_settings, log_sweep
from fovea.app.untold import Untold
from fovea.evaluation.budget_results import BudgetResult, BudgetSample
from fovea.evaluation.page.build import PAGE, page_over
from fovea.evaluation.report import write_report
from fovea.evaluation.results import ALL, SpeedResult
from tests.app.wandb_records import files, records
from tests.evaluation.page.made_up import SETTINGS, answers, job


class Recorder:
    """A logger that keeps what it is given."""

    def log_hyperparams(self, settings: dict[str, Any]) -> None:
        self.settings = settings


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_settings_are_plain_and_tell_no_folder_of_this_machine(name):
    typed = ["seed=5", "drafter.retrieval.rho=0.6", "paths.output_dir=/home/me/run", "paths.cache=/home/me/cache"]
    typed += ["model.path=/home/me/models/Qwen", "resume=/home/me/run/earlier"]
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
    assert recorder.settings["model"]["path"] == "<elsewhere>/Qwen"
    assert recorder.settings["resume"] == "<output_dir>/earlier"
    assert {"commit", "versions"} <= recorder.settings["provenance"].keys()
    assert "command" not in recorder.settings["provenance"]
    assert cfg.paths.output_dir == "/home/me/run", "the job itself still knows"


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished evaluation with visual budgets, report and page."""
    folder = job(tmp_path / "run", better=1)
    settings = SETTINGS | {"ratios": [0, 0.25, 0.75, 1], "low": 0.25, "high": 0.75, "focus_tokens": 2}
    sample = BudgetSample("a", "captions", 9, 3, [[0, 1, 1, 2], [2, 2, 2, 2]], [[1, 2], [2, 3], [2, 3]], [[0], [1]])
    BudgetResult([sample], settings=settings).save(folder / "evaluation" / "final")
    write_report(folder)
    page_over([folder], folder / PAGE)
    return folder


def table(text: str) -> list[dict[str, Any]]:
    content = json.loads(text)
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def test_tables_hold_every_figure_and_one_type_a_column():
    result = SpeedResult(answers(1), {}, SETTINGS)
    columns, rows = figures_table(result)
    pooled = dict(zip(columns, rows[-1], strict=True))
    figures = result.figures()[ALL]
    assert pooled["family"] == ALL
    assert (pooled["tau"], pooled["tau_low"]) == (figures["tau"], figures["intervals"]["tau"][0])
    assert pooled["time_share_prefill"] == figures["time_share"]["prefill"]
    assert pooled["prefill_share_high"] == figures["intervals"]["prefill_share"][1]
    assert pooled["peak_memory_ratio"] is None
    low, high = figures["intervals"]["mean_of_sample_speedups"]
    found = [pooled[f"mean_of_sample_speedups{end}"] for end in ("", "_low", "_high")]
    assert found == [figures["mean_of_sample_speedups"], low, high]
    for column in zip(*rows, strict=True):
        assert len({type(value) for value in column if value is not None}) <= 1
    empty = BudgetResult([], settings={"ratios": [0, 1], "low": 0, "high": 1})
    assert budget_tables(empty)["budgets"][1][0][:2] == [ALL, 0.0]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B offline, in a project's folder of its own."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb_cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb_data"))


def test_an_offline_run_holds_tables_pictures_and_page_and_no_folder(run, offline, tmp_path):
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        typed = [f"paths.output_dir={run}", f"ckpt={run}/drafter", "diagnostics=budget"]
        cfg = compose("evaluate", overrides=typed, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    with tracking.closed_at_end():
        built = tracking.loggers(cfg)
        log_settings(built, cfg)
        log_result(built, SpeedResult.load(run / "evaluation" / "final"), run)
    found = files(run)
    result = SpeedResult.load(run / "evaluation" / "final")
    (pooled,) = [row for row in table(found["final/figures"]) if row["family"] == ALL]
    assert pooled["tau"] == pytest.approx(result.figures()[ALL]["tau"])
    assert len(table(found["final/answers"])) == len(result.prompts)
    assert table(found["final/budgets"])[-1]["states"] == 2
    deepest = [row for row in table(found["final/acceptance"]) if row["family"] == ALL][-1]
    assert deepest["reach_rate"] == result.figures()[ALL]["reach_rate"][-1]
    assert [row["focus"] for row in table(found["final/focus"])] == ["attended", "retrieved"] * 2
    assert "Visual budgets and focus" in found["final/page"]
    sent = records(run)
    logged = {item.key or item.nested_key[0] for r in sent for item in r.history.item}
    assert {"final/figures", "final/page", "final/speed_by_family", "final/tau"} <= logged
    _tells_nothing(sent, found, tmp_path)


def test_a_sweep_is_a_run_of_its_own(offline, tmp_path, monkeypatch):
    sweep = tmp_path / "2026-01-02" / "03-04-05"
    for number in range(2):
        job(sweep / str(number), better=number, overrides=[f"decode.tree.nodes={number}", f"ckpt={tmp_path}/x"])
    assert write_sweep_page(sweep) == sweep / PAGE
    shutil.copy(Path(__file__).parents[2] / "docs" / "evidence.png", sweep / "summary.png")
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("evaluate")
    summary = [["job", "ckpt", "tau"], ["0", f"{tmp_path}/x", "2.0"], ["1", f"{sweep}/y", "3.0"]]
    log_sweep(cfg, sweep, summary)
    found = files(sweep)
    assert [row["job"] for row in table(found["sweep/summary"])] == ["0", "1"]
    assert table(found["sweep/summary"])[1]["ckpt"] == "<sweep>/y"
    compared = table(found["sweep/comparison"])
    assert [row["method"] for row in compared] == ["fovea, nodes=0", "fovea, nodes=1"]
    assert "2 evaluations of fovea" in found["sweep/page"]
    rows = {row["method"]: row for row in table(found["sweep/fovea_table1_llava-next-7b"])}
    taus = [row["tau"] for row in compared]
    assert rows["FOVEA"]["here: a target"].endswith(f" / {taus[0]:.2f} to {taus[1]:.2f} (2)")
    assert rows["FOVEA"]["Avg"] == "1.68x / 3.96"
    times = table(found["sweep/times"])
    assert [row["draft ms"] for row in times] == pytest.approx([3.0, 3.0])
    assert {f"sweep/{path.stem}" for path in (sweep / "page_tables").iterdir()} <= found.keys()
    sent = records(sweep)
    logged = {item.key or item.nested_key[0] for record in sent for item in record.history.item}
    assert {"sweep/plots/speed-against-tau", "sweep/plots/acceptance-by-depth", "sweep/summary"} <= logged
    (begun,) = [record.run for record in sent if record.HasField("run")]
    assert (begun.run_group, begun.job_type) == ("2026-01-02 03-04-05", "sweep")
    _tells_nothing(sent, {"page": found["sweep/page"]}, sweep)

    monkeypatch.setenv("WANDB_MODE", "disabled")
    other = tmp_path / "other"
    log_sweep(cfg, other, summary)
    assert not other.exists()


def _tells_nothing(sent: list[Any], found: dict[str, str], folder: Path) -> None:
    """Artifacts name files that are to be uploaded; those places stay here."""
    for record in sent:
        if record.WhichOneof("record_type") != "artifact":
            assert str(folder) not in str(record), record.WhichOneof("record_type")
            assert str(CONFIG_DIR.parent) not in str(record), record.WhichOneof("record_type")
    assert not [name for name, text in found.items() if str(folder) in text or str(Path.home()) + "/" in text]


def test_known_folders_become_words_and_of_others_the_name_is_left(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    untold = Untold({"output_dir": tmp_path / "outputs" / "run", "cache": "~/.cache/fovea"})
    assert untold.text(f"{tmp_path}/outputs/run/x and {tmp_path}/data") == "<output_dir>/x and <here>/data"
    settings = {"a": ["/elsewhere/models/Qwen", 3, None], "b": {"c": "~/x", "d": "outputs/run"}}
    told = untold.settings(settings)
    assert told == {"a": ["<elsewhere>/Qwen", 3, None], "b": {"c": "<home>/x", "d": "outputs/run"}}
