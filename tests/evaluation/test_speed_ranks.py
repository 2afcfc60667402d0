"""Speed evaluation in a real process group: each rank measures its share, all get the pooled result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fovea.decoding.scripted import RandomProposer
from fovea.decoding.trace import GenerationTrace
from fovea.evaluation import race
from fovea.evaluation.results import LosslessnessError, SpeedResult
from fovea.evaluation.speed import evaluate_and_save
from fovea.evaluation.speed_config import SpeedConfig
from fovea.targets.conversation import Conversation
from fovea.targets.load import load_target
from tests.evaluation.test_metrics import CASES, assert_same, metric_of, sources_of

KEYS = ["one", "two", "three"]


def misquote(trace: GenerationTrace) -> GenerationTrace:
    trace.tokens[-1] += 1
    return trace


#: How many of the golden samples the first rank has; with all of them the second one is idle.
SHARES = (1, 3, len(CASES["basic"]["samples"]))


def metrics_over_ranks(rank: int, share: int) -> dict:
    """What every rank is told of samples that are shared."""
    case = CASES["basic"]
    own = case["samples"][:share] if rank == 0 else case["samples"][share:]
    return metric_of(own, sources_of(case)).compute()


def work(rank: int, folder: Path, checkpoint: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    target = load_target(checkpoint, device="cpu", dtype=torch.float32)
    prompts = [Conversation(key, [{"role": "user", "content": f"name {key}"}], source="text") for key in KEYS]
    proposer = RandomProposer(vocab_size=target.spec.vocab_size, nodes=4)
    config = SpeedConfig(max_new_tokens=5, warmup_prompts=0, transformers_prompts=0)
    seen: list[int] = []
    evaluation = folder / "evaluation"
    result = evaluate_and_save(
        target, proposer, prompts, config, evaluation, progress=lambda done, _: seen.append(done)
    )
    assert seen == [[1, 2], [1]][rank]
    assert result.figures()["all"]["samples"] == 3
    torch.save([p.speculative.key for p in result.prompts], folder / f"keys{rank}")
    torch.save([metrics_over_ranks(rank, share) for share in SHARES], folder / f"metrics{rank}")

    # A wrong answer on one rank stops all of them.
    if rank == 1:
        right = race.generate
        race.generate = lambda *args, **kwargs: misquote(right(*args, **kwargs))  # type: ignore[assignment]
    with pytest.raises(LosslessnessError, match="1 of 3"):
        evaluate_and_save(target, proposer, prompts, config, folder / "wrong")
    dist.destroy_process_group()


def test_two_processes_pool_their_results(tmp_path, small_target_path):
    mp.spawn(work, args=(tmp_path, small_target_path), nprocs=2)
    keys = [torch.load(tmp_path / f"keys{rank}") for rank in range(2)]
    assert keys[0] == keys[1] == KEYS
    whole = metric_of(CASES["basic"]["samples"], sources_of(CASES["basic"])).compute()
    for told in (told for rank in range(2) for told in torch.load(tmp_path / f"metrics{rank}")):
        assert_same(told, whole)
    saved = SpeedResult.load(tmp_path / "evaluation")
    assert [p.speculative.key for p in saved.prompts] == keys[0]
    assert saved.settings["processes"] == 2
