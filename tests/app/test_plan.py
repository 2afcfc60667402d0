"""``plan=true``: every model and drafter is planned from its configuration alone, and what is at hand counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from fovea.app.launch import CONFIG_DIR
from fovea.app.plan import find_architecture, plan_job
from fovea.app.typed import SettingError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.drafters.training_free import CONFIGS
from fovea.planning import plan as planning
from fovea.planning.replica import KeptBytes
from fovea.targets.teacher_batch import TeacherSample
from tests.targets.published_layouts import PUBLISHED, with_layers

ROOT = Path(__file__).resolve().parents[2]
MODELS = [path.stem for path in sorted((CONFIG_DIR / "model").glob("*.yaml"))]
DRAFTERS = [path.stem for path in sorted((CONFIG_DIR / "drafter").glob("*.yaml")) if path.stem not in CONFIGS]


def composed(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("train", overrides=[*overrides, f"paths.output_dir={folder}", f"paths.cache={folder}"])


def planned(folder: Path, *overrides: str) -> dict:
    plan_job(composed(folder, *overrides))
    return json.loads((folder / "plan.json").read_text())


@pytest.fixture
def unmeasured(monkeypatch):
    """Activations are measured in tests of their own."""
    monkeypatch.setattr(planning, "kept_bytes", lambda trained, with_pictures: KeptBytes((5e5, 3e6, 5e4, 10.0)))


@pytest.mark.usefixtures("unmeasured")
class TestWhatIsToldOfARun:
    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("model", MODELS)
    def test_every_model_and_drafter(self, model, drafter, tmp_path, capsys):
        plan = planned(tmp_path, f"model={model}", f"drafter={drafter}")
        parts = plan["parameters"]
        assert parts["total"] == sum(count for name, count in parts.items() if name != "total")
        assert plan["artifact_bytes"] == plan["samples"] * plan["sample_bytes"] > 0
        assert plan["updates"]["total"] > 0
        assert all(phase["total"] == sum(phase["parts"].values()) for phase in plan["typical"].values())
        assert f"{drafter} for {model}" in capsys.readouterr().out

    def test_the_papers_qwen_run(self, tmp_path, capsys):
        """Table 6; 539.6 M is what the stated modules have, whatever the paper's total."""
        plan = planned(tmp_path, "model=qwen25vl", "experiment=fovea")
        assert (plan["samples"], plan["updates"]) == (57_671, {"per_epoch": 7_209, "total": 86_508, "warmup": 2_000})
        assert plan["parameters"]["total"] == 539_567_617
        assert plan["target_parameters"]["total"] == 8_292_166_656
        out = capsys.readouterr().out
        assert "86,508" in out
        assert "the FOVEA paper's number" in out

    def test_the_papers_llava_run(self, tmp_path):
        plan = planned(tmp_path, "model=llava_next_vicuna_7b", "experiment=fovea")
        assert (plan["updates"]["total"], plan["updates"]["warmup"]) == (43_260, 4_326)

    def test_what_the_settings_change(self, tmp_path):
        model = "model=qwen25vl"
        base = planned(tmp_path, model)
        assert planned(tmp_path, model, "planning.samples=1000")["updates"]["total"] == 12 * 125
        assert planned(tmp_path, model, "trainer.max_steps=77")["updates"]["total"] == 77
        assert planned(tmp_path, model, "trainer.devices=4")["updates"]["per_epoch"] == 3_605
        assert planned(tmp_path, model, "drafter.num_blocks=1")["parameters"]["total"] < base["parameters"]["total"]
        half = planned(tmp_path, model, "data.export.dtype=fp8")["sample_bytes"] / base["sample_bytes"]
        assert 0.5 < half < 0.51
        single = planned(tmp_path, model, "model.dtype=float32")["typical"]["evaluate.py"]["parts"]["target"]
        assert single == 2 * base["typical"]["evaluate.py"]["parts"]["target"]

    def test_a_live_target_stores_nothing(self, tmp_path, capsys):
        plan = planned(tmp_path, "model=qwen25vl", "data.online=true")
        assert plan["artifact_bytes"] == 0
        assert "export" not in plan["typical"]
        assert plan["typical"]["training"]["parts"]["target"] == 2 * 8_292_166_656
        out = capsys.readouterr().out
        assert "not stored" in out
        assert "host memory" not in out  # it stays on its device
        assert planned(tmp_path, "model=qwen25vl")["host_bytes"] == 2 * 2 * 8_292_166_656
        assert "host memory of the target" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("model", "kept", "longest"),
        [
            ("llava15_7b", "5120", {"tokens": 4096, "visual": 2618, "answer": 1022}),
            ("llava15_7b", "null", {"tokens": 4096, "visual": 2618, "answer": 1022}),
            ("llava15_7b", "2048", {"tokens": 2048, "visual": 1309, "answer": 511}),
            ("llava15_7b", "500", {"tokens": 901, "visual": 576, "answer": 225}),
            ("llava_next_mistral_7b", "5120", {"tokens": 5120}),
        ],
    )
    def test_no_sample_is_longer_than_the_context(self, model, kept, longest, tmp_path):
        plan = planned(tmp_path, f"model={model}", f"data.export.max_tokens={kept}")
        assert plan["longest"] == plan["longest"] | longest

    def test_pictures_in_the_place_of_visual_tokens(self, tmp_path, capsys):
        model = "model=llava_next_vicuna_7b"
        base, again = planned(tmp_path, model), planned(tmp_path, model, "data.export.visual=recomputed")
        assert base["sample_bytes"] - again["sample_bytes"] == 2_340 * 4096 * 2 - 163_000
        parts = again["typical"]["training"]["parts"]
        assert parts.pop("target's vision tower") == 2 * 324_491_264
        assert parts == base["typical"]["training"]["parts"]
        assert "assumed to take 163,000 bytes" in capsys.readouterr().out
        named = planned(tmp_path, model, "data.export.visual=recomputed", "planning.picture_bytes=1000")
        assert again["sample_bytes"] - named["sample_bytes"] == 162_000
        drawn = planned(tmp_path, "data.export.visual=recomputed")
        assert drawn["sample_bytes"] < planned(tmp_path)["sample_bytes"]
        assert "The pictures of 32 conversations at hand" in capsys.readouterr().out
        with pytest.raises(SettingError, match=r"smollm2 has none: it reads text only; use .*visual=stored"):
            planned(tmp_path, "model=smollm2", "data.export.visual=recomputed")

    def test_whether_it_fits(self, tmp_path, capsys):
        plan = planned(tmp_path, "model=qwen25vl", "planning.device_memory_gib=24")
        fits = {name: phase["fits"] for name, phase in plan["typical"].items()}
        assert fits == {"export": True, "training": True, "speed evaluation": False, "evaluate.py": True}
        assert "It does not fit: speed evaluation takes" in capsys.readouterr().out
        planned(tmp_path, "model=qwen25vl", "planning.device_memory_gib=32")
        assert "training: typical samples fit into 32 GiB; a batch of the longest" in capsys.readouterr().out
        planned(tmp_path, "model=qwen25vl", "planning.device_memory_gib=200")
        assert "It fits" in capsys.readouterr().out
        plan = planned(tmp_path, "planning.accelerator=cpu")
        assert {phase["fits"] for phase in plan["typical"].values()} == {None}

    def test_the_gpus_of_this_machine_are_told_beside_those_of_the_run(self, tmp_path, capsys, monkeypatch):
        """It need not be the machine that trains."""
        run, known = ("model=llava_next_vicuna_7b", "planning.samples=100"), ("planning.device_memory_gib=80",)
        for here, said in (
            (0, "The run takes 2 GPUs (trainer.devices), and this machine has none.\n"),
            (4, "The run takes 2 GPUs (trainer.devices), and this machine has 4.\n"),
            (1, "has 1. Here trainer.devices=1 trainer.accumulate_grad_batches=8 has the same global batch.\n"),
        ):
            monkeypatch.setattr("fovea.app.plan.gpus_here", lambda here=here: here)
            planned(tmp_path, *run, *known)
            assert said in capsys.readouterr().out
        planned(tmp_path, *run, "planning.accelerator=cpu")
        assert "this machine has" not in capsys.readouterr().out

    def test_a_warm_up_longer_than_the_training_is_foretold(self, tmp_path, capsys):
        planned(tmp_path, "model=qwen25vl", "planning.samples=100")
        assert "Training would be refused: scheduler.warmup_steps is 2000" in capsys.readouterr().out

    def test_conversations_at_hand_are_counted(self, tmp_path, capsys):
        path = tmp_path / "some.jsonl"
        turns = [{"role": "user", "content": "what?"}]
        path.write_text("".join(json.dumps({"key": str(n), "messages": turns}) + "\n" for n in range(50)))
        plan = planned(tmp_path, "model=qwen25vl", f"data.path={path}", "data.loader.val_fraction=0.1")
        assert plan["samples"] == 45
        assert "45 of 50 conversations at hand" in capsys.readouterr().out

    def test_artifacts_at_hand_are_measured(self, tmp_path, capsys):
        folder, fingerprint = tmp_path / "artifacts", Fingerprint("none", {}, "random", (1,), "bf16", "dataset")
        with ArtifactWriter(folder, fingerprint, dtype="bf16", shard_bytes=1 << 20) as writer:
            for number in range(10):
                place = torch.arange(40 + number)
                tensors = (place, place.expand(3, -1), place > 30 + number, place < 20)
                states = (torch.zeros(rows, 8) for rows in (len(place), 9, 20))
                writer.write(TeacherSample(str(number), *tensors, *states), SampleMeta())
        finish_rank(folder, fingerprint, {}, 0, 1)
        plan = planned(tmp_path, "model=qwen25vl", f"data.train={folder}", "data.loader.val_fraction=0")
        assert (plan["samples"], plan["lengths"]) == (10, {"tokens": 44, "visual": 20, "answer": 9})
        assert "means of the 10 samples" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("planning.tokens=100", "planning: 100 tokens, 391 of them visual and 225 of answers, are no sample"),
            ("planning.samples=0", "samples is 0"),
            ("planning.accelerator=tpu", "planning.accelerator is 'tpu'; choose from: gpu, cpu"),
            ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches is 0; it must be at least 1"),
            ("trainer.accumulate_grad_batches=1.5", "accumulate_grad_batches must be a whole number, got 1.5"),
            ("trainer.devices=auto", "trainer.devices is auto; a plan needs the number"),
            ("model.architecture.num_layers=0", "num_layers is 0"),
            ("+model.architecture.depth=3", "model.architecture has no field 'depth'"),
            ("drafter=pld", "pld has no weights, so there is nothing to train"),
        ],
    )
    def test_what_cannot_be_planned(self, override, message, tmp_path):
        with pytest.raises(SettingError, match=message):
            planned(tmp_path, "model=qwen25vl", override)


class TestTheTargetAtHand:
    def test_its_configuration_counts_and_differences_are_named(self, small_target_path, tmp_path):
        """The configuration is enough, the weights need not be there."""
        shutil.copy(small_target_path / "config.json", tmp_path)
        model = composed(tmp_path, "model=qwen25vl", f"model.path={tmp_path}").model
        notes: list[str] = []
        found = find_architecture(model, notes)
        assert (found.hidden_size, found.num_layers) == (64, 4)
        assert any(note.startswith("model.architecture.num_layers is 28") and "has 4" in note for note in notes)

    def test_sizes_that_agree_are_said_to(self, small_target_path, tmp_path):
        from fovea.targets.architecture import read_architecture

        found = read_architecture(small_target_path)
        model = composed(tmp_path, f"model.path={small_target_path}").model
        model.architecture = OmegaConf.create(vars(found))
        notes: list[str] = []
        assert find_architecture(model, notes) == found
        assert notes == [f"The target's sizes are those of {small_target_path / 'config.json'}."]

    @pytest.mark.parametrize("preset", PUBLISHED)
    def test_published_configurations_agree_with_the_presets(self, preset, tmp_path):
        """As their makers wrote them, fields at the top level and fields left out."""
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[preset]))
        model = composed(tmp_path, f"model={preset}", f"model.path={tmp_path}").model
        notes: list[str] = []
        found = find_architecture(model, notes)
        assert notes == [f"The target's sizes are those of {tmp_path / 'config.json'}."]
        (tmp_path / "config.json").write_text(json.dumps(with_layers(PUBLISHED[preset], found.num_layers - 1)))
        notes.clear()
        assert find_architecture(model, notes).num_layers == found.num_layers - 1
        named = f"model.architecture.num_layers is {found.num_layers}; {tmp_path / 'config.json'} has "
        assert notes == [f"{named}{found.num_layers - 1}, which counts."]

    def test_sizes_known_from_nowhere(self, tmp_path):
        model = composed(tmp_path, "model=qwen25vl", "model.architecture=null", "model.hub_id=none/such").model
        with pytest.raises(SettingError, match=r"model\.architecture is not set and no config\.json"):
            find_architecture(model, [])


def test_the_command_ends_with_the_plan(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), "plan=true", "model=smollm2", "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "memory per device" in done.stdout
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert outcome["metrics"]["parameters"] == plan["parameters"]["total"]
