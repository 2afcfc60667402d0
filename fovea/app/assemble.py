"""The parts of a job out of its settings; the order in which they come together is in ``train.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from callbacks.checkpoint_files import CheckpointFiles
from callbacks.origin import Fingerprinted
from datamodules.conversation_source import ConversationSource
from datamodules.trained_on import tell_of_trained
from fovea.app import runs, sources, targets, tracking
from fovea.app.devices import decoding_dtype, device_of, training_precision, warn_of_emulation
from fovea.app.provenance import note_drafter, note_fingerprints
from fovea.app.ranks import require_devices, require_strategy, wait_for_all
from fovea.app.settings import Settings, read_settings, with_layers_read
from fovea.app.typed import SettingError
from fovea.app.watch import watch
from fovea.artifacts.fingerprint import processor_settings
from fovea.decoding.selection import resolve
from fovea.drafters.base import Drafter
from fovea.drafters.checkpoint import Teaching, adopt_weights, load_drafter
from fovea.drafters.registry import build_drafter
from fovea.drafters.training_free import CONFIGS, TrainingFree
from fovea.evaluation.drafter_evaluation import DrafterEvaluation
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.page.build import PAGE, page_over
from fovea.evaluation.prompts import balanced
from fovea.evaluation.report import print_table, write_report
from fovea.evaluation.results import LosslessnessError
from fovea.evaluation.unfinished import discard_answers
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget
from fovea.targets.load import load_generation_config, load_head, load_spec, weights_fingerprint
from fovea.targets.quantised import require_quantizer
from fovea.training.module import DrafterModule

#: Callbacks in ``conf/callbacks`` with a switch of their own; the second needs the whole target.
GATES, SPEED_EVALUATION = "gates", "speed_evaluation"


@dataclass(frozen=True)
class Job:
    """A job whose settings have been checked: the configuration, its dataclasses, its device and its folder, and the
    conversations of the benchmark, where they have been read."""

    cfg: DictConfig
    settings: Settings
    device: torch.device
    folder: Path
    prompts: Sequence[Conversation] | None = None


def start(cfg: DictConfig) -> Job:
    """The job of ``cfg``, whose settings are written into its folder.

    Raises:
        SettingError: a value cannot be used.
        FileNotFoundError: the target or the conversations are not where they should be.
    """
    settings = read_settings(cfg)
    if cfg.task == "train" and cfg.drafter.name in CONFIGS:
        name = cfg.drafter.name
        raise SettingError(f"{name} has no weights, so there is nothing to train: python evaluate.py drafter={name}")
    if settings.budget is not None and cfg.drafter.name in CONFIGS:
        raise SettingError(
            f"{cfg.drafter.name} has no weights and sees no picture, so it has no visual budget; leave diagnostics "
            "out, or measure a trained drafter: ckpt=outputs/<date>/<time>-fovea"
        )
    if cfg.task == "train":
        require_strategy(cfg)
    require_devices(cfg)
    targets.require_target(cfg.model)
    targets.require_eyes(cfg.model, settings)
    prompts = sources.require_sources(cfg, settings)
    runs.initial_drafter(cfg)
    folder = Path(cfg.paths.output_dir)
    runs.record_settings(folder, cfg)
    device = device_of(cfg.trainer.accelerator)
    warn_of_emulation(cfg.model.dtype, cfg.trainer.precision if cfg.task == "train" else "", device)
    return Job(cfg, settings, device, folder, prompts)


def find_target(job: Job) -> Path:
    """Checkpoint folder of the target, built if it must be."""
    return targets.find_target(job.cfg, job.settings.target_recipe)


def make_datamodule(job: Job, target: Path) -> L.LightningDataModule:
    """The data module; it exports artifacts where they are missing, for which alone it loads the target."""
    settings = with_layers_read(job.settings, load_spec(target))
    load_vision = targets.vision_loader(target, job.cfg.model.dtype)
    return sources.make_datamodule(job.cfg, settings, target, _loader(job, target, to_device=True), load_vision)


def _loader(job: Job, target: Path, *, to_device: bool) -> Callable[[], HFTarget]:
    """Loads the whole target; where it teaches online, everybody shares it."""
    dtype = job.cfg.model.dtype
    if job.settings.online:
        return targets.live_loader(target, dtype, job.device)
    return targets.loader(target, dtype, job.device, to_device=to_device)


def make_evaluation(job: Job, target: Path, checkpoint: Path | None = None) -> DrafterEvaluation:
    """The speed evaluation on the benchmark; the target is loaded when it is first needed.

    Warns of prompts that the exported drafter at ``checkpoint`` was trained on; None: the one that the job trains.

    Raises:
        SelectionError: tokens cannot be selected as the settings ask.
        UnsupportedTargetError: what reads the target's quantised weights is not installed.
    """
    require_quantizer(target)
    selection = resolve(job.settings.selection, load_generation_config(target), load_spec(target))
    fingerprint = weights_fingerprint(target)
    note_fingerprints(job.folder, target=fingerprint)
    prompts = sources.prompts(job.cfg) if job.prompts is None else job.prompts
    records: dict[str, Any] = {"benchmark_records": prompts.counts()} if isinstance(prompts, ConversationSource) else {}
    if seen := _trained_on(job, prompts, checkpoint):
        records["benchmark_trained_on"] = seen
    return DrafterEvaluation(
        _loader(job, target, to_device=False),
        prompts,
        job.settings.tree,
        job.settings.speed,
        selection=selection,
        settings={
            "benchmark": job.cfg.benchmark.name,
            **targets.name_target(job.cfg.model, target),
            "target_weights": fingerprint,
            **records,
        },
        identity={"target_weights": fingerprint},
        budget=job.settings.budget,
        progress=job.cfg.trainer.enable_progress_bar,
    )


def _trained_on(job: Job, prompts: Sequence[Conversation], checkpoint: Path | None) -> int:
    """How many of the prompts that are asked were trained on, as far as is known."""
    place = sources.trained_on(job.cfg, checkpoint)
    if place is None:
        return 0
    return tell_of_trained(balanced(prompts, job.settings.speed.prompts), place, job.cfg.benchmark.name)


def note_data(job: Job, datamodule: L.LightningDataModule) -> None:
    """Keeps in the job's folder what the artifacts of its ``datamodule``, which is set up, depend on."""
    if isinstance(datamodule, Fingerprinted):
        note_fingerprints(job.folder, **datamodule.fingerprints())


def make_module(job: Job, target: Path) -> DrafterModule:
    """A drafter for the target, untrained or with the weights of ``init_from``, and how it is trained.

    Of the target only the head is loaded.

    Raises:
        CheckpointError: ``init_from`` belongs to another drafter or target.
    """
    head = load_head(target, dtype=decoding_dtype(job.cfg.model.dtype, job.device))
    drafter = build_drafter(job.cfg.drafter.name, load_spec(target), job.settings.drafter, head)
    fingerprint = weights_fingerprint(target)
    note_fingerprints(job.folder, target=fingerprint)
    if (source := runs.initial_drafter(job.cfg)) is not None:
        adopt_weights(drafter, source, fingerprint)
    return DrafterModule(
        drafter,
        job.settings.objective,
        instantiate(job.cfg.optimizer),
        instantiate(job.cfg.scheduler) if "_target_" in job.cfg.scheduler else None,
        job.settings.unroll,
        Teaching(job.settings.export.mid_layers, fingerprint, processor_settings(target)),
    )


def make_trainer(job: Job, loggers: list[Logger], evaluation: DrafterEvaluation | None) -> L.Trainer:
    """Lightning's trainer with those of ``cfg.callbacks`` that are switched on; its ranks watch each other."""
    nodes = dict(job.cfg.callbacks)
    if not job.settings.gates:
        nodes.pop(GATES)
    if evaluation is None:
        nodes.pop(SPEED_EVALUATION)
    given = {SPEED_EVALUATION: {"evaluation": evaluation}}
    callbacks = [instantiate(node, **given.get(name, {})) for name, node in nodes.items()]
    precision = training_precision(job.cfg.trainer.precision, job.device)
    strategy = instantiate(job.cfg.strategy) if "_target_" in job.cfg.strategy else job.cfg.strategy.name
    trainer = instantiate(
        job.cfg.trainer,
        precision=precision,
        strategy=strategy,
        logger=loggers,
        callbacks=callbacks,
        plugins=[CheckpointFiles()],
    )
    watch(trainer.strategy.launcher, job.folder)
    return trainer


def training_time(trainer: L.Trainer) -> dict[str, float]:
    """Seconds of all training steps, if a callback has counted them: no export, no evaluation."""
    counted = trainer.callback_metrics.get("throughput/train_s")
    return {} if counted is None else {"train_s": float(counted)}


def judged_drafter(
    job: Job, target: Path, checkpoint: Path | None, overrides: Mapping[str, Any]
) -> Drafter | TrainingFree:
    """The exported drafter at ``checkpoint``, its settings changed by ``overrides``; None: a method without weights.

    Raises:
        CheckpointError: it was trained beside another target, one of the same sizes included.
    """
    if checkpoint is None:
        return TrainingFree(job.cfg.drafter.name, job.settings.drafter)
    head = load_head(target, dtype=decoding_dtype(job.cfg.model.dtype, job.device))
    teaching = Teaching(target_fingerprint=weights_fingerprint(target), processor=processor_settings(target))
    drafter = load_drafter(checkpoint, head, load_spec(target), overrides, teaching=teaching)
    note_drafter(job.folder, checkpoint if checkpoint.is_dir() else checkpoint.parent)
    return drafter


def conclude(
    job: Job,
    evaluation: DrafterEvaluation,
    drafter: Drafter | TrainingFree,
    device: torch.device,
    loggers: list[Logger],
) -> dict[str, float]:
    """The final evaluation on all ranks, its report and its table; returns the headline numbers.

    That of the run which this one resumes goes on where it was cut short, if it was of the same drafter. Its answers
    stay on disk one by one until the job is recorded as completed: one killed before makes its report again from them.

    Raises:
        LosslessnessError: after the report was written.
    """
    folder = job.folder / EVALUATIONS / FINAL
    try:
        result = evaluation.run(
            drafter,
            folder,
            device=device,
            count=job.settings.speed.prompts,
            method=job.cfg.get("method"),
            earlier=None if (run := runs.earlier(job.cfg)) is None else run / EVALUATIONS / FINAL,
            insist=job.cfg.resume is not None and job.cfg.task == "evaluate",
        )
    except LosslessnessError:
        _report(job, loggers)
        wait_for_all()  # a process that fails takes the first one with it, and the report must be written before
        rank_zero_only(discard_answers)(folder)
        raise
    _report(job, loggers)
    wait_for_all()
    return result.summary()


@rank_zero_only
def _report(job: Job, loggers: list[Logger]) -> None:
    result = write_report(job.folder)
    page = page_over([job.folder], job.folder / PAGE)[0] if job.settings.page else None
    tracking.log_result(loggers, result, job.folder)
    print_table(result)
    print(f"report in {job.folder / 'report.md'}" + (f", page in {page}" if page else ""))
