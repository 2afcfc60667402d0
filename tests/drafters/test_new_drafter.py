"""Methods of a user's own, added as docs/new_drafter.md leads: registered, trained, lossless, and run as jobs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fovea.decoding.autoregressive import generate_autoregressive
from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import generate
from fovea.drafters.base import Drafter
from fovea.drafters.checkpoint import load_drafter, save_drafter
from fovea.drafters.proposer import NeuralProposer
from fovea.drafters.registry import DRAFTERS, drafter_type, register_drafter
from fovea.drafters.training_free import CONFIGS, TrainingFree, register_proposer
from fovea.targets.teacher_batch import TeacherBatch
from fovea.training.gates import PARITY_TOLERANCE, parity_gate
from fovea.training.unroll import unroll
from tests.drafters.plain import sample

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new_drafter.md"
CODE = Path(__file__).with_name("own_methods.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def own_methods() -> Iterator[ModuleType]:
    """The module, registered while the tests of this file run: others list all methods that there are."""
    module = importlib.import_module("tests.drafters.own_methods")
    yield module
    del DRAFTERS["mlp"], CONFIGS["echo"], sys.modules[module.__name__]


@pytest.fixture
def drafter(own_methods, small_target) -> Drafter:
    torch.manual_seed(0)
    kind = drafter_type("mlp")
    return kind(small_target.spec, own_methods.MlpConfig(depth=3, width=64), small_target.head).eval()


def test_the_page_shows_this_code_and_it_is_short():
    _, shown, _ = re.split(r"# The page shows.*\n", CODE)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [shown] == blocks
    for name in ("MlpConfig", "EchoConfig"):
        start = shown.index(f"class {name}")
        assert len([line for line in shown[start:].split("\n\n\n@dataclass")[0].splitlines() if line]) < 60


def test_a_drafter_of_ones_own_learns_and_passes_the_parity_gate(drafter):
    spec = drafter.spec
    batch = TeacherBatch.collate([sample(spec, seed, "tpptt" + "a" * 9) for seed in range(3)])
    batch = batch.to("cpu", torch.float32)
    assert parity_gate(drafter, batch) < PARITY_TOLERANCE
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        rows = unroll(drafter, batch, steps=3)
        loss = (rows.h_hat - rows.teacher[rows.teacher_index]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", ["mlp", "echo"])
def test_methods_of_ones_own_are_lossless(name, own_methods, drafter, small_target, small_conversations):
    if name == "mlp":
        proposer = NeuralProposer(drafter, TreeConfig(width=6, depth=3, nodes=40))
    else:
        proposer = TrainingFree("echo", own_methods.EchoConfig()).proposer(small_target.spec)
    drafted, accepted = 0, 0
    for conversation in (c for c in small_conversations if c.key in ("image", "two", "text")):
        encoded = small_target.encode(replace(conversation, messages=conversation.messages[:1]))
        baseline = generate_autoregressive(small_target, encoded, max_new_tokens=32, eos_ids=())
        trace = generate(small_target, proposer, encoded, max_new_tokens=32, eos_ids=())
        assert trace.tokens == baseline.tokens
        drafted += sum(r.draft_nodes for r in trace.rounds)
        accepted += sum(r.accepted for r in trace.rounds)
    assert drafted
    assert accepted or name == "echo"  # a random target seldom says the same twice


def test_its_checkpoint_comes_back(own_methods, drafter, small_target, tmp_path):
    save_drafter(tmp_path, drafter)
    again = load_drafter(tmp_path, small_target.head, small_target.spec)
    assert type(again) is own_methods.MlpDrafter
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), drafter.parameters(), strict=True))


def test_a_name_belongs_to_one_method(own_methods):
    assert register_drafter(own_methods.MlpDrafter) is own_methods.MlpDrafter  # a module that is loaded again
    for taken in ("fovea", "pld"):
        with pytest.raises(ValueError, match=f"called '{taken}' exists already"):
            register_drafter(type("Another", (own_methods.MlpDrafter,), {"name": taken}))
    with pytest.raises(ValueError, match="called 'pld' exists already"):
        register_proposer("pld", own_methods.EchoConfig, own_methods.EchoProposer)


def test_the_pages_commands_train_and_measure_it(small_target_path, small_conversations, tmp_path):
    (tmp_path / "my_methods.py").write_text(CODE, encoding="utf-8")
    folder = tmp_path / "my_conf" / "drafter"
    folder.mkdir(parents=True)
    files = re.findall(r"```yaml\n# my_conf/drafter/(\w+\.yaml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")
    lines = [f'{{"key": "{n}", "messages": [{{"role": "user", "content": "what is {n}?"}}]}}' for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    shared = [
        *(f"model.path={small_target_path}", "data=jsonl", "data.path=data.jsonl", "data.heldout_path=data.jsonl"),
        *("model.mid_layers=[1,2]", "data.export.max_new_tokens=8", "data.loader.num_workers=0"),
        *("decode.max_new_tokens=8", "speed.prompts=2", "speed.prompts_per_epoch=1", "speed.warmup_prompts=0"),
        *("speed.transformers_prompts=0", "trainer.accelerator=cpu", "trainer.max_epochs=1", "logger=csv"),
        "scheduler.warmup_steps=0",
        f"paths.cache={tmp_path / 'cache'}",
    ]

    def job(script: str, *overrides: str) -> subprocess.CompletedProcess:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [sys.executable, str(ROOT / script), *overrides]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    own = ["--config-dir", "my_conf", "plugins=[my_methods]"]
    for script, overrides in (
        ("train.py", [*own, "drafter=mlp", "objective=eagle", "hydra.run.dir=run", *shared]),
        ("evaluate.py", ["ckpt=run", "plugins=[my_methods]", "logger=csv"]),
        ("evaluate.py", [*own, "drafter=echo", *shared]),
    ):
        done = job(script, *overrides)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "/0/0" in done.stdout  # answers neither tied nor unexplained
    done = job("evaluate.py", "ckpt=run", "logger=csv")
    assert done.returncode == 1
    assert "would run the module 'my_methods'" in done.stderr
    done = job("train.py", "plugins=[my_method]", *shared)
    assert done.returncode == 1
    assert "plugins names the module 'my_method', and it is not found" in done.stderr
