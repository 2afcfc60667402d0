"""The plan of the job that the settings describe: ``plan=true``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fovea.app.devices import DTYPES, devices_per_node, fewer_devices, gpus_here
from fovea.app.runs import record_settings
from fovea.app.settings import Settings, read_settings, with_layers_read
from fovea.app.sources import source
from fovea.app.targets import require_eyes
from fovea.app.typed import SettingError, build, convert
from fovea.app.updates import batching_of, schedule_fault, updates_of
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.size import SampleLengths
from fovea.drafters.training_free import CONFIGS
from fovea.planning.config import PlanConfig
from fovea.planning.memory import GIB
from fovea.planning.plan import PLAN, Run, make_plan
from fovea.planning.table import print_plan
from fovea.planning.updates import Batching, Updates
from fovea.targets.architecture import Architecture, read_architecture
from fovea.targets.images import encoded_picture

#: Samples of the FOVEA paper's runs (its Table 6), and the memory of the GPUs that both papers measure on.
PAPER_SAMPLES, PAPER_DEVICE_GIB = 57_671, 80.0

#: A photograph of COCO on average: 19.3 GB of its training images of 2017, 118,287 of them, about 640 x 480 pixels.
PICTURE_BYTES = 163_000
#: Conversations whose pictures are weighed, if some are at hand.
PICTURES_LOOKED_AT = 32


def wants_plan(cfg: DictConfig) -> bool:
    """Whether the job ends with its plan."""
    return convert(cfg.plan, bool, "plan")


def plan_job(cfg: DictConfig) -> dict[str, float]:
    """Prints the plan of ``cfg``, writes it into the run's folder, and returns its headline numbers.

    Neither weights nor data need be there; what is there is looked at, and differences are named.

    Raises:
        SettingError: a value cannot be used, or the sizes of the target are known from nowhere.
    """
    if cfg.drafter.name in CONFIGS:
        name = cfg.drafter.name
        raise SettingError(f"{name} has no weights, so there is nothing to train: python evaluate.py drafter={name}")
    settings = read_settings(cfg)
    config = build(PlanConfig, _plain(cfg.planning), "planning")
    notes: list[str] = []
    architecture = find_architecture(cfg.model, notes)
    settings = with_layers_read(settings, architecture.spec())
    samples, lengths = find_samples(cfg, settings, config, notes)
    picture_bytes = None
    if settings.export.visual == "recomputed" and not settings.online:
        require_eyes(cfg.model, settings)
        picture_bytes = find_picture_bytes(cfg, config, notes)
    on_gpu = config.accelerator == "gpu"
    batching = batching_of(cfg, _devices(cfg, on_gpu=on_gpu, notes=notes))
    run = Run(
        architecture=architecture,
        drafter=(cfg.drafter.name, settings.drafter),
        objective=settings.objective,
        precision=_named(cfg.trainer.precision, "bf16-mixed" if on_gpu else "32-true"),
        target_dtype=DTYPES[_named(cfg.model.dtype, "bfloat16" if on_gpu else "float32")],
        optimizer=instantiate(cfg.optimizer),
        steps=settings.unroll.steps or settings.drafter.depth + 1,
        max_anchors=settings.unroll.max_anchors,
        batching=batching,
        updates=_updates(cfg, samples, batching, notes),
        export=settings.export,
        tree=settings.tree,
        max_new_tokens=settings.speed.max_new_tokens,
        samples=samples,
        lengths=lengths,
        picture_bytes=picture_bytes,
        online=settings.online,
        on_gpu=on_gpu,
        device_bytes=_device_bytes(config, notes),
    )
    plan = make_plan(run)
    folder = Path(cfg.paths.output_dir)
    record_settings(folder, cfg)
    plan.write(folder)
    notes.append(f"In plain numbers: {folder / PLAN}.")
    print_plan(plan, f"{cfg.drafter.name} for {cfg.model.name}", notes)
    return plan.numbers()


def find_architecture(model: DictConfig, notes: list[str]) -> Architecture:
    """The sizes of the target: of its config.json if it is at hand, else those in ``model.architecture``.

    Raises:
        SettingError: neither is there.
    """
    stated = model.get("architecture")
    known = None if stated is None else build(Architecture, _plain(stated), "model.architecture")
    folder = _config_folder(model)
    if folder is None:
        if known is None:
            raise SettingError(
                "model.architecture is not set and no config.json of the target is at hand; "
                "point model.path to a folder that holds it"
            )
        notes.append("The target's sizes are those in conf/model; no config.json is at hand to compare them with.")
        return known
    found = read_architecture(folder)
    differences = {} if known is None else known.differences(found)
    if not differences:
        notes.append(f"The target's sizes are those of {folder / 'config.json'}.")
    for name, (ours, theirs) in differences.items():
        notes.append(f"model.architecture.{name} is {ours}; {folder / 'config.json'} has {theirs}, which counts.")
    return found


def find_samples(
    cfg: DictConfig, settings: Settings, config: PlanConfig, notes: list[str]
) -> tuple[int, SampleLengths]:
    """How many samples are trained on, and how long they are.

    Finished artifacts in a local folder are measured, and conversations at hand are counted.
    """
    lengths = build_lengths(config)
    node = OmegaConf.select(cfg, "data.train")
    assumed = f"assumed (planning.tokens={lengths.tokens} and the like)"
    if isinstance(node, str) and (Path(node).expanduser() / MANIFEST).is_file():
        manifest = Manifest.read(Path(node).expanduser())
        count, lengths = _trained(cfg, settings, len(manifest)), _mean_lengths(manifest)
        notes.append(f"Lengths are means of the {len(manifest):,} samples in {node}.")
    elif isinstance(node, str) or _unset(node):
        count = PAPER_SAMPLES
        notes.append(
            f"{count:,} samples is the FOVEA paper's number; give data.path or planning.samples. Lengths are {assumed}."
        )
    else:
        conversations = source(cfg, "data.train")
        count = _trained(cfg, settings, len(conversations))
        notes.append(
            f"{count:,} of {len(conversations):,} conversations at hand are trained on. Lengths are {assumed}."
        )
    return config.samples or count, lengths


def find_picture_bytes(cfg: DictConfig, config: PlanConfig, notes: list[str]) -> int:
    """Bytes of the encoded pictures of a sample: as the settings say, else the mean of some conversations at hand."""
    if config.picture_bytes is not None:
        return config.picture_bytes
    node = OmegaConf.select(cfg, "data.train")
    if not isinstance(node, str) and not _unset(node):
        shown = islice((c.images for c in source(cfg, "data.train") if c.images), PICTURES_LOOKED_AT)
        sizes = [sum(len(encoded_picture(image)) for image in images) for images in shown]
        if sizes:
            notes.append(
                f"The pictures of {len(sizes)} conversations at hand take {sum(sizes) / len(sizes):,.0f} bytes."
            )
            return round(sum(sizes) / len(sizes))
    notes.append(f"A sample's pictures are assumed to take {PICTURE_BYTES:,} bytes (planning.picture_bytes).")
    return PICTURE_BYTES


def build_lengths(config: PlanConfig) -> SampleLengths:
    """The lengths of a typical sample.

    Raises:
        SettingError: no sample has them.
    """
    try:
        return SampleLengths(config.tokens, config.visual_tokens, config.answer_tokens)
    except ValueError as error:
        raise SettingError(f"planning: {error}") from error


def _mean_lengths(manifest: Manifest) -> SampleLengths:
    entries = list(manifest.samples())
    tokens, visual, answer = (
        round(sum(getattr(entry, name) for entry in entries) / len(entries))
        for name in ("tokens", "visual", "supervised")
    )
    return SampleLengths(tokens, visual, max(1, answer))


def _trained(cfg: DictConfig, settings: Settings, samples: int) -> int:
    """Those of ``samples`` that are not kept for validation."""
    share = settings.loader.val_fraction
    if OmegaConf.select(cfg, "data.val") is not None or not share:
        return samples
    return samples - max(1, round(share * samples))


def _unset(node: Any) -> bool:
    return node is None or any(name in node and node[name] is None for name in ("path", "folder"))


def _config_folder(model: DictConfig) -> Path | None:
    """Where the target's config.json is, if it is anywhere on this machine; nothing is fetched."""
    if model.path is not None:
        return Path(model.path).expanduser()
    if model.hub_id is None:
        return None
    found = try_to_load_from_cache(model.hub_id, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def _plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]


def _named(value: str, auto: str) -> str:
    return auto if value == "auto" else value


def _devices(cfg: DictConfig, *, on_gpu: bool, notes: list[str]) -> int:
    """Devices of a machine that train; notes how many GPUs this one has, which need not be the one that trains."""
    asked = devices_per_node(cfg.trainer)
    if not asked:
        raise SettingError(
            f"trainer.devices is {cfg.trainer.devices}; a plan needs the number of devices: trainer.devices=2"
        )
    if on_gpu:
        here = gpus_here()
        notes.append(
            f"The run takes {asked} GPU{'s' * (asked > 1)} (trainer.devices), and this machine has {here or 'none'}."
            + (f" Here {fewer_devices(cfg.trainer, here)} has the same global batch." if 0 < here < asked else "")
        )
    return asked


def _updates(cfg: DictConfig, samples: int, batching: Batching, notes: list[str]) -> Updates:
    """The updates; what the schedule itself would refuse is noted."""
    updates = updates_of(cfg, samples, batching)
    if fault := schedule_fault(cfg, updates.total):
        notes.append(f"Training would be refused: {fault}.")
    return updates


def _device_bytes(config: PlanConfig, notes: list[str]) -> int | None:
    if config.device_memory_gib is not None:
        return round(config.device_memory_gib * GIB)
    if config.accelerator == "cpu":
        return None
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    notes.append(f"No GPU is here; devices of {PAPER_DEVICE_GIB:.0f} GiB are assumed (planning.device_memory_gib).")
    return round(PAPER_DEVICE_GIB * GIB)
