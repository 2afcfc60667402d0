"""``traces=`` and ``audit=`` as commands, and the target's word on ties."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from fovea.app.launch import CONFIG_DIR
from fovea.app.outputs import outputs_job, reads_outputs
from fovea.app.typed import SettingError
from fovea.decoding.autoregressive import generate_autoregressive
from fovea.evaluation.audit import IncompleteError
from fovea.evaluation.losslessness import compare
from fovea.evaluation.prompts import user_turns
from fovea.evaluation.results import LosslessnessError
from fovea.targets.base import Encoded
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_target
from tests.evaluation.mmspec_layout import write, write_folder

ROOT = Path(__file__).resolve().parents[2]


def composed(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("evaluate", overrides=[*overrides, f"paths.output_dir={folder}", f"paths.cache={folder}"])


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(ROOT / "evaluate.py"), *overrides, "hydra.run.dir=run"]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_published_traces_as_a_command(tmp_path):
    write_folder(tmp_path / "published" / "target")
    done = command(tmp_path, "traces=published")
    assert done.returncode == 0, done.stderr
    assert "by_round: 9 of 10 published values are met" in done.stdout
    assert (tmp_path / "run" / "traces.md").is_file()
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["metrics"]["target/by_turn/tau"] == 4.0


def test_an_audit_as_a_command_fails_where_nothing_explains_a_difference(tmp_path):
    folder = write_folder(tmp_path / "published")
    a, b = (folder / f"{name}-temperature-0.jsonl" for name in ("baseline", "by_round"))
    done = command(tmp_path, f"audit=[{a},{b}]")
    assert done.returncode == 1
    assert "2 of 4 answers differ without an explanation, first 'b#2'" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["answers"]["exact"] == 2


def test_settings(tmp_path):
    folder = write_folder(tmp_path / "published")
    a, b, c = (folder / f"{name}-temperature-0.jsonl" for name in ("baseline", "by_round", "by_turn"))
    assert not reads_outputs(composed(tmp_path))
    assert reads_outputs(composed(tmp_path, f"traces={folder}"))
    counts = outputs_job(composed(tmp_path, f"audit=[{a},{c}]"))
    assert counts == {"answers_exact": 4, "answers_cut": 0, "answers_tie": 0, "answers_unexplained": 0}
    with pytest.raises(LosslessnessError, match="1 of 4"):
        outputs_job(composed(tmp_path, f"audit=[{a},{b}]", "auditing.cap=[9,2]"))
    part = tmp_path / "part.jsonl"
    part.write_text("".join(c.read_text().splitlines(keepends=True)[:2]))
    for pair in (f"[{a},{part}]", f"[{part},{a}]"):
        with pytest.raises(IncompleteError, match=r"3 answers could be compared; .*part\.jsonl lacks 1, such as 'c'"):
            outputs_job(composed(tmp_path, f"audit={pair}"))
    partial = outputs_job(composed(tmp_path, f"audit=[{a},{part}]", "auditing.partial=true"))
    assert (partial["answers_exact"], partial["answers_unexplained"]) == (3, 0)
    for overrides, message in (
        ((f"audit=[{a}]",), "is no evaluation of ours"),
        ((f"audit=[{a},{b},{c}]",), "audit names 3 sets"),
        ((f"audit=[{a},{c}]", "auditing.cap=[1]"), "auditing: cap is \\[1\\]"),
        ((f"audit=[{a},{c}]", "auditing.cap=0"), "must be at least 1"),
        ((f"audit=[{a},{c}]", "auditing.ties=maybe"), "auditing.ties must be true or false"),
        ((f"traces={folder}", "auditing.cap=[1,2]"), "published traces have one cap"),
    ):
        with pytest.raises(SettingError, match=message):
            outputs_job(composed(tmp_path, *overrides))
    with pytest.raises(SettingError, match="give one of them"):
        reads_outputs(composed(tmp_path, f"traces={folder}", f"audit=[{a},{b}]"))


def runners_up(target: HFTarget, encoded: Encoded, answer: list[int]) -> list[int]:
    """The second best token at every place of an answer."""
    state, prefill = target.prefill(encoded, len(answer) + 1)
    hidden = target.extend(state, torch.tensor(answer), state.text_positions(torch.arange(len(answer))))
    logits = target.lm_head(torch.cat([prefill.hidden[-1:], hidden]))[: len(answer)].float()
    logits[torch.arange(len(answer)), torch.tensor(answer)] = -torch.inf
    return logits.argmax(-1).tolist()


@torch.inference_mode()
def test_the_target_is_asked_about_ties_behind_the_earlier_answers(small_target_path, tmp_path):
    """In bf16, one answer leaves the target's own at a near-tie, another one at a token that is far from it."""
    messages = [{"role": "user", "content": words} for words in ("name a colour", "and another one")]
    write(tmp_path / "prompts.jsonl", {"key": "k", "messages": messages})
    target = load_target(small_target_path, device="cpu", dtype=torch.bfloat16)
    first, second = user_turns(Conversation("k", messages))
    opening = generate_autoregressive(target, target.encode(first), max_new_tokens=12).tokens
    encoded = target.encode(second, [opening])
    answer = generate_autoregressive(target, encoded, max_new_tokens=40, eos_ids=()).tokens
    found = {}
    for place, token in enumerate(runners_up(target, encoded, answer)):
        changed = [*answer[:place], token]
        found.setdefault(compare(target, encoded, answer, changed, max_new_tokens=60).outcome, changed)
    assert found.keys() == {"tie", "unexplained"}
    paths = {}
    for name, own in (("reference", answer), *found.items()):
        records = [{"key": "k#1", "tokens": opening}, {"key": "k#2", "tokens": own}]
        paths[name] = write(tmp_path / f"{name}.jsonl", *records)
    settings = ["benchmark=jsonl", f"benchmark.path={tmp_path / 'prompts.jsonl'}", f"model.path={small_target_path}"]
    settings += ["model.dtype=bfloat16", "auditing.ties=true", "decode.max_new_tokens=60", "trainer.accelerator=cpu"]
    with pytest.raises(LosslessnessError, match=r"1 of 2 .*'k#2'"):
        outputs_job(composed(tmp_path, *settings, f"audit=[{paths['reference']},{paths['unexplained']}]"))
    counts = outputs_job(composed(tmp_path, *settings, f"audit=[{paths['reference']},{paths['tie']}]"))
    assert (counts["answers_exact"], counts["answers_tie"]) == (1, 1)
    with pytest.raises(LosslessnessError, match="1 of 2"):
        outputs_job(composed(tmp_path, f"audit=[{paths['reference']},{paths['tie']}]"))
    elsewhere = write(tmp_path / "elsewhere.jsonl", {"key": "z", "tokens": [1]})
    with pytest.raises(SettingError, match="the benchmark has no prompt 'z'"):
        outputs_job(composed(tmp_path, *settings, f"audit=[{elsewhere},{elsewhere}]"))
    words = write(tmp_path / "words.jsonl", {"key": "k#1", "text": "x"})
    with pytest.raises(SettingError, match="needs tokens"):
        outputs_job(composed(tmp_path, *settings, f"audit=[{words},{words}]"))
