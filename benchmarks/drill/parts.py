"""The three jobs of the drill: how each is started and resumed, how far it was, and what its end must be."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from benchmarks.drill.processes import Job
from fovea.app.outcome import FILE as OUTCOME
from fovea.app.outcome import Outcome
from fovea.app.runs import LAST_CHECKPOINT
from fovea.artifacts.manifest import MANIFEST
from fovea.artifacts.reading import open_artifacts
from fovea.drafters.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.results import CONTINUED, SpeedResult
from fovea.evaluation.unfinished import JOURNALS


class Part(ABC):
    """A kind of job. A chain is one job that is killed and resumed until it is done.

    Args:
        target: checkpoint folder of the target.
        conversations: file of what is exported, trained on and asked.
        ranks: processes that share a job, 1 or 2.
    """

    #: What is done; :attr:`name` also says by how many.
    work: str

    def __init__(self, target: Path, conversations: Path, ranks: int = 1) -> None:
        self.target, self.conversations, self.ranks = target, conversations, ranks

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.work if self.ranks == 1 else f"{self.work}, {self.ranks} ranks"

    @abstractmethod
    def next_job(self, chain: Path, draw: random.Random) -> Job:
        """The job that begins the chain in the folder ``chain``, or goes on behind those that were killed in it."""

    @abstractmethod
    def phase(self, job: Job) -> str:
        """How far the killed ``job`` was, by the files that it left."""

    @abstractmethod
    def result(self, chain: Path) -> Any:
        """What the finished chain came to; equal to that of a job that nobody disturbed."""

    def over(self, job: Job) -> bool:
        """Whether the killed ``job`` had recorded that it was completed, so that there is nothing to go on with."""
        return False

    def left(self, chain: Path) -> list[Path]:
        """Files that a job removes when it ends; one that is killed behind its record may leave them."""
        return []

    def noted(self, job: Job) -> Any:
        """What the end must still hold of what the killed ``job`` had done."""
        return None

    def kept(self, chain: Path, noted: list[Any]) -> bool:
        """Whether it does."""
        return True


class Export(Part):
    """``python -m fovea.artifacts.export``: the same keys, and under each the same bytes."""

    work = "export"

    def next_job(self, chain: Path, draw: random.Random) -> Job:
        out = chain / "artifacts"
        words = f"--target {self.target} --out {out} --mid-layers 1 2 --dtype fp32 --max-new-tokens 8 --batch-size 2"
        data = f"--shard-bytes 40000 --data datamodules.conversations:JsonlConversations path={self.conversations}"
        writer = f"--writer {draw.choice(('process', 'thread'))}"
        words = (*words.split(), *data.split(), *writer.split())
        return Job("fovea.artifacts.export", words, chain, out, self.ranks)

    def phase(self, job: Job) -> str:
        names = {path.name for path in job.watched.glob("*")} if job.watched.is_dir() else set()
        indices = {name for name in names if name.startswith("shard-") and name.endswith(".json")}
        if MANIFEST in names:
            return "manifest written"
        if any(name.startswith((f".{MANIFEST}", ".rank-")) for name in names):
            return "manifest or mark of the rank being written"
        if any(name.startswith("rank-") for name in names):
            return "rank done, no manifest yet"
        if any(name.startswith(".shard-") and ".json." in name for name in names):
            return "index being written"
        if any(name.replace(".json", ".tar") not in names for name in indices):
            return "index there, shard not renamed"
        if any(name.startswith(".shard-") for name in names):
            return "shard growing"
        return f"between shards, {len(indices)} whole" if indices else "before the first shard"

    def result(self, chain: Path) -> Any:
        artifacts = open_artifacts(chain / "artifacts")
        artifacts.verify()
        left = [path.name for path in (chain / "artifacts").glob(".shard-*")]
        content = {}
        for entry, shard in zip(artifacts.entries, artifacts._shard_of, strict=True):
            raw = (chain / "artifacts" / shard.name).read_bytes()
            assert entry.key not in content, f"{entry.key} twice"
            content[entry.key] = [raw[offset : offset + size] for offset, size in (entry.meta, entry.data)]
        return content, left


#: A class of no package that is trusted: it is typed again where a run is resumed.
_WATCHED = "callbacks.watch._target_=benchmarks.drill.watch.Watch"
_SETTINGS = (
    "model.mid_layers=[1,2]",
    "model.drafter_blocks=1",
    "model.correction_width=16",
    "data=jsonl",
    "data.export.max_new_tokens=8",
    "data.export.dtype=fp32",
    "data.loader.num_workers=0",
    "data.loader.batch_size=1",
    "scheduler.warmup_steps=1",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.max_epochs=3",
    "trainer.accumulate_grad_batches=2",
    "unroll.max_anchors=4",
    "callbacks.checkpoint.every_n_steps=1",
    "speed_eval=off",
    f"+{_WATCHED}",
    "+callbacks.watch.path=${paths.output_dir}/steps.jsonl",
)


class Training(Part):
    """``train.py`` and ``train.py resume=``: the same samples in the same order, losses and weights, bit for bit."""

    work = "training"

    def __init__(self, target: Path, conversations: Path, ranks: int = 1) -> None:
        super().__init__(target, conversations, ranks)
        self.cache = conversations.parent / "cache"

    def next_job(self, chain: Path, draw: random.Random) -> Job:
        runs = _runs(chain)
        run = chain / f"run-{len(runs):02d}"
        begun = [earlier for earlier in runs if (earlier / LAST_CHECKPOINT).is_file()]
        if begun:
            words = [f"resume={begun[-1]}", f"++{_WATCHED}"]
        else:
            words = [*_SETTINGS, f"model.path={self.target}", f"data.path={self.conversations}"]
            words += [f"data.heldout_path={self.conversations}", f"paths.cache={self.cache}"]
            words += [f"trainer.devices={self.ranks}"]
        return Job("train.py", (*words, f"hydra.run.dir={run}"), chain, run, self.ranks)

    def phase(self, job: Job) -> str:
        run, drafter = job.watched, job.watched / "drafter"
        last = run / LAST_CHECKPOINT
        if not last.is_file():
            written = any(run.rglob("*last.ckpt.partial"))
            return "first checkpoint being written" if written else "before the first checkpoint"
        if any(run.rglob("*last.ckpt.partial")):
            return "checkpoint being written"
        if any(path.name.startswith(".") for path in run.glob("drafter*/*")):
            return "drafter being written"
        weights, config = drafter / WEIGHTS_FILE, drafter / CONFIG_FILE
        if not config.is_file() or weights.stat().st_mtime_ns < last.stat().st_mtime_ns:
            return "checkpoint there, its drafter not yet"
        if config.stat().st_mtime_ns < weights.stat().st_mtime_ns:
            return "weights of the drafter there, its config not yet"
        return "between checkpoints"

    def result(self, chain: Path) -> Any:
        """Steps of the whole chain and the weights; every run's steps must join those of the one it resumed."""
        steps: dict[tuple[int, int, int], Any] = {}
        for run in _runs(chain):
            for epoch, batch, rank, keys, loss in _steps(run):
                found = steps.setdefault((epoch, batch, rank), (keys, loss))
                assert found == (keys, loss), f"{run}: epoch {epoch}, batch {batch}, rank {rank}"
        last = _runs(chain)[-1]
        state = torch.load(last / LAST_CHECKPOINT, weights_only=True)
        weights = {name: (last / name / WEIGHTS_FILE).read_bytes() for name in ("drafter", "drafter_best")}
        return sorted(steps.items()), state["global_step"], weights, _untimed(state["callbacks"])


class Evaluation(Part):
    """``evaluate.py``, begun again in its folder or with ``resume=``: the same answers, rounds and figures.

    Args:
        drafter: exported drafter that is measured; None measures lookahead, whose memory must be made again.
    """

    def __init__(self, target: Path, conversations: Path, drafter: Path | None, ranks: int = 1) -> None:
        super().__init__(target, conversations, ranks)
        self.drafter = drafter
        self.work = "evaluation" if drafter is not None else "evaluation, lookahead"

    def next_job(self, chain: Path, draw: random.Random) -> Job:
        runs = _runs(chain)
        words = ["method=lookahead"] if self.drafter is None else [f"ckpt={self.drafter}"]
        words += [word for word in _SETTINGS if "watch" not in word]
        words += [f"model.path={self.target}", f"data.path={self.conversations}"]
        words += [f"data.heldout_path={self.conversations}", f"paths.cache={self.conversations.parent / 'cache'}"]
        words += ["speed.prompts=12", "speed.warmup_prompts=1", "speed.transformers_prompts=1", "speed.resamples=20"]
        words += ["speed.trajectories=1", "decode.max_new_tokens=24", f"trainer.devices={self.ranks}"]
        begun = [run for run in runs if any((run / EVALUATIONS / FINAL).glob(JOURNALS))]
        if begun and draw.random() < 0.5:
            run = begun[-1]  # the same command in the same folder
        else:
            run = chain / f"run-{len(runs):02d}"
            words = [f"resume={begun[-1]}"] if begun else words
        return Job("evaluate.py", (*words, f"hydra.run.dir={run}"), chain, run, self.ranks)

    def phase(self, job: Job) -> str:
        folder = job.watched / EVALUATIONS / FINAL
        names = {path.name for path in folder.glob("*")} if folder.is_dir() else set()
        if _completed(job.watched):
            return "completed, its process not yet gone"
        if (job.watched / "report.md").is_file():
            return "report written"
        if "traces.jsonl" in names:
            return "results written, report not yet"
        if any(name.startswith((".traces", ".evaluation")) for name in names):
            return "results being written"
        return "some answers, no results" if self.noted(job) else "before the first answer"

    def over(self, job: Job) -> bool:
        return _completed(job.watched)

    def noted(self, job: Job) -> Any:
        journals = sorted((job.watched / EVALUATIONS / FINAL).glob(JOURNALS))
        return [json.loads(line) for journal in journals for line in journal.read_bytes().split(b"\n")[1:-1]]

    def kept(self, chain: Path, noted: list[Any]) -> bool:
        """Every answer that was once on disk is in the result with the seconds that it took then."""
        result = SpeedResult.load(_measured(chain) / EVALUATIONS / FINAL)
        end = {p.speculative.key: json.loads(json.dumps(p.to_json())) for p in result.prompts}
        answers = [prompt for journal in noted for item in journal for prompt in item["prompts"]]
        return all(end[prompt["speculative"]["key"]] == prompt for prompt in answers)

    def left(self, chain: Path) -> list[Path]:
        return list((_measured(chain) / EVALUATIONS / FINAL).glob(JOURNALS))

    def result(self, chain: Path) -> Any:
        run = _measured(chain)
        folder = run / EVALUATIONS / FINAL
        result = SpeedResult.load(folder)
        settings = {name: value for name, value in result.settings.items() if name != CONTINUED}
        answers = [_untimed(prompt.to_json()) for prompt in result.prompts]
        assert (run / "report.md").is_file()
        return answers, result.failed, settings, result.summary()["tau"], (folder / "trajectories.jsonl").read_bytes()


def _untimed(value: Any) -> Any:
    """``value`` without seconds and bytes of memory."""
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if not k.endswith("_s") and k != "peak_memory_bytes"}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def _runs(chain: Path) -> list[Path]:
    return sorted(chain.glob("run-*"))


def _measured(chain: Path) -> Path:
    """The run that was completed; one begun behind it may have been killed before its first answer, and not gone on."""
    (run,) = [run for run in _runs(chain) if _completed(run)]
    return run


def _completed(run: Path) -> bool:
    return (run / OUTCOME).is_file() and Outcome.read(run).status == "completed"


def _steps(run: Path) -> list[Any]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []
