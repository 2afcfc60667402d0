"""DeepSpeed's ZeRO-2: what it is told, against the paper's tables, and where it is installed, what it does on a CPU."""

from __future__ import annotations

import os
import socket
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from omegaconf import DictConfig, OmegaConf

from fovea.app.launch import CONFIG_DIR
from fovea.app.ranks import require_strategy
from fovea.app.typed import SettingError
from fovea.training import zero
from fovea.training.zero import MissingExtraError, ZeroStrategy
from tests.training.conftest import drafter_maker, make_head, sample_maker
from tests.training.test_ranks import SHAPES, STEPS, fit, outcome

needs_deepspeed = pytest.mark.skipif(
    not zero._DEEPSPEED_AVAILABLE, reason="DeepSpeed is not installed: pip install -e '.[deepspeed]'"
)

#: FOVEA, Table 6 (per-device batch / accumulation / global batch; warm-up) and the paragraph that describes it.
TABLE_6 = {
    "llava_next_vicuna_7b": {"batch": (2, 4, 16), "warmup": 4326, "schedule": "linear"},
    "qwen25vl": {"batch": (4, 1, 8), "warmup": 2000, "schedule": "deepspeed_log"},
}


def composed(model: str) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        overrides = [f"model={model}", "experiment=fovea", "strategy=deepspeed_zero2", "paths.output_dir=/run"]
        return compose("train", overrides=overrides)


@pytest.mark.parametrize("model", TABLE_6)
def test_what_is_handed_over_is_the_papers(model) -> None:
    cfg, paper = composed(model), TABLE_6[model]
    config: Any = OmegaConf.to_container(cfg.strategy.config, resolve=True)
    micro, accumulation, global_batch = paper["batch"]
    assert config["train_micro_batch_size_per_gpu"] == cfg.data.loader.batch_size == micro
    assert cfg.trainer.accumulate_grad_batches == accumulation
    assert micro * accumulation * cfg.trainer.devices * cfg.trainer.num_nodes == global_batch
    assert config["zero_optimization"]["stage"] == 2
    assert not {"offload_optimizer", "offload_param"} & config["zero_optimization"].keys()
    assert config["gradient_clipping"] == cfg.trainer.gradient_clip_val == 0.5
    assert cfg.trainer.precision == "bf16-mixed"
    # Optimizer and schedule are ours, so none may be DeepSpeed's; Lightning sets these two itself.
    assert not {"optimizer", "scheduler", "bf16", "gradient_accumulation_steps"} & config.keys()
    optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (5e-5, (0.9, 0.95), 0.0)
    assert cfg.scheduler._target_.rsplit(".", 1)[1] == paper["schedule"]
    assert (cfg.scheduler.warmup_steps, cfg.scheduler.warmup_ratio) == (paper["warmup"], None)
    assert (cfg.trainer.max_epochs, cfg.trainer.devices, cfg.seed) == (12, 2, 42)


@needs_deepspeed
@pytest.mark.parametrize("model", TABLE_6)
def test_what_lightning_makes_of_it(model) -> None:
    """The configuration that ``deepspeed.initialize`` gets, and that DeepSpeed takes every field of it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    cfg, (micro, accumulation, global_batch) = composed(model), TABLE_6[model]["batch"]
    strategy = instantiate(cfg.strategy)
    strategy.precision_plugin = DeepSpeedPrecision(cfg.trainer.precision)
    strategy.config["gradient_accumulation_steps"] = accumulation  # from the trainer, which is not here
    strategy._init_config_if_needed()
    read = DeepSpeedConfig(strategy.config | {"train_batch_size": global_batch // cfg.trainer.devices})
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (micro, accumulation)
    assert read.bfloat16_config.enabled
    assert not read.float16_config.enabled
    assert (read.zero_optimization_stage, read.gradient_clipping) == (2, 0.5)
    assert read.optimizer_name is None
    assert read.grad_accum_dtype == "fp32"
    assert read.zero_config.offload_optimizer is None


def test_without_deepspeed_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(zero, "_DEEPSPEED_AVAILABLE", False)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[deepspeed\]', or choose strategy=ddp"):
        ZeroStrategy({"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(MissingExtraError):
        require_strategy(composed("qwen25vl"))


def test_without_a_gpu_another_strategy_is_named(monkeypatch) -> None:
    monkeypatch.setattr(zero, "_DEEPSPEED_AVAILABLE", True)
    cfg = composed("qwen25vl")
    cfg.trainer.accelerator = "cpu"
    with pytest.raises(SettingError, match="choose strategy=ddp or fsdp2"):
        require_strategy(cfg)
    cfg.trainer.accelerator = "gpu"
    require_strategy(cfg)


class OnCpu(ZeroStrategy):
    """Lightning refuses DeepSpeed without a GPU, and DeepSpeed itself does not."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed asks for a number

    def setup_environment(self) -> None:
        from lightning.pytorch.strategies import DDPStrategy

        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


CASES: dict[str, dict[str, Any]] = {
    "clipped": {},
    # Twelve samples a rank in batches of five: the last window of an epoch has one micro-batch instead of two.
    "accumulated": {"batch_size": 5, "accumulate_grad_batches": 2, "gradient_clip_val": None},
    "half": {"epochs": 1},
    "resumed": {"resume": "half"},
    "bf16": {"precision": "bf16-mixed"},
}


def work(rank: int, port: int, folder: Path, drafter, samples) -> None:
    """What each of two ranks does."""
    torch.set_num_threads(1)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ |= {name: str(value) for name, value in places.items()}
    for name, case in CASES.items():
        config: Any = OmegaConf.to_container(composed("qwen25vl").strategy.config, resolve=True)
        config |= {"gradient_clipping": case.get("gradient_clip_val", 0.5) or 0.0}
        settings = {"devices": 2, "strategy": OnCpu(config), **case}
        if "resume" in settings:
            settings["resume"] = folder / settings["resume"] / "checkpoints" / "last.ckpt"
        fit(folder / name, deepcopy(drafter), samples, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder and drafter of runs on two ranks, and of two on one rank without DeepSpeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        folder, shared = tmp_path_factory.mktemp("zero"), make_head()
        drafter = drafter_maker(shared)(depth=3)
        samples = [sample_maker(shared)(seed, parts) for seed, parts in enumerate(SHAPES)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(work, args=(port, folder, drafter, samples), nprocs=2)
    for name, settings in (("one", {"batch_size": 8}), ("one_accumulated", {"batch_size": 20})):
        clip = {"gradient_clip_val": None} if name.endswith("accumulated") else {}
        fit(folder / name, deepcopy(drafter), samples, **settings, **clip)
    return folder, drafter


@needs_deepspeed
@pytest.mark.whole
class TestOnACpu:
    @pytest.mark.parametrize(("name", "alone"), [("clipped", "one"), ("accumulated", "one_accumulated")])
    def test_it_makes_the_steps_of_one_rank(self, runs, name, alone) -> None:
        folder, drafter = runs
        (whole, weights), (parts, own) = outcome(folder / alone, drafter), outcome(folder / name, drafter)
        assert len(parts["losses"]) == len(whole["losses"]) == (STEPS if name == "clipped" else 4)
        assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        torch.testing.assert_close(own, weights, rtol=0, atol=1e-6)

    def test_its_checkpoint_resumes_and_holds_the_drafter_alone(self, runs) -> None:
        folder, drafter = runs
        (first, _), (second, weights) = outcome(folder / "half", drafter), outcome(folder / "resumed", drafter)
        whole, uncut = outcome(folder / "clipped", drafter)
        assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        torch.testing.assert_close(weights, uncut, rtol=0, atol=1e-6)
        saved = folder / "clipped" / "checkpoints" / "last.ckpt"
        (model,) = saved.glob("checkpoint/*model_states.pt")
        state = torch.load(model, weights_only=False)["module"]
        assert state.keys() == {f"drafter.{name}" for name in drafter.state_dict()}
        assert len(list(saved.glob("checkpoint/*optim_states.pt"))) == 2

    def test_weights_are_trained_in_float32_behind_bfloat16(self, runs) -> None:
        """The export has the exact ones, and is close to what float32 alone would have given."""
        folder, drafter = runs
        (whole, weights), (half, own) = outcome(folder / "one", drafter), outcome(folder / "bf16", drafter)
        began = torch.cat([p.detach().flatten() for p in drafter.parameters()])
        assert own.dtype == torch.float32
        assert not torch.equal(own, own.bfloat16().float())
        assert half["losses"] == pytest.approx(whole["losses"], rel=0.02)
        assert torch.cosine_similarity(own - began, weights - began, dim=0) > 0.95
