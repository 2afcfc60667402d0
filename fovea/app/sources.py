"""Where the data of a job come from: the data module, and the prompts on which speed is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from lightning import LightningDataModule
from omegaconf import DictConfig, OmegaConf

from callbacks.origin import TRAINED_ON
from datamodules.conversation_source import ConversationSource
from datamodules.online import OnlineDataModule
from datamodules.trained_on import NotTrainedOn, TrainedOn, place_of
from fovea.app.settings import Settings
from fovea.app.typed import SettingError
from fovea.app.updates import require_updates
from fovea.drafters.checkpoint import read_record
from fovea.targets.base import Target
from fovea.targets.conversation import Conversation
from fovea.targets.hf import HFTarget


def require_sources(cfg: DictConfig, settings: Settings) -> Sequence[Conversation] | None:
    """Refuses paths that are not set or lead nowhere, and a benchmark that cannot be read whole, before anything
    expensive; gives the conversations of the benchmark, None where there is none.

    Raises:
        SettingError: a path is not set.
        FileNotFoundError: there is nothing at the path.
        SourceError: a record or a picture of the benchmark, by file and line.
    """
    if cfg.task == "train":
        for where in ("data.train", "data.val"):
            source(cfg, where)
        _texts(cfg, settings)
    if cfg.task != "evaluate" and not settings.speed_eval:
        return None
    asked = prompts(cfg)
    if isinstance(asked, ConversationSource):
        asked.require_pictures()  # which reads it
    return asked


def make_datamodule(
    cfg: DictConfig,
    settings: Settings,
    checkpoint: Path,
    load_target: Callable[[], Target],
    load_vision: Callable[[torch.device], HFTarget],
) -> LightningDataModule:
    """The data module of ``cfg.data``; it exports what ``load_target`` teaches where artifacts are missing, or lets the
    live target teach. ``load_vision`` loads what it sees with onto a device, for artifacts that hold pictures."""
    if settings.online:
        return OnlineDataModule(
            load_target=load_target,
            export=settings.export,
            train=source(cfg, "data.train"),
            val=source(cfg, "data.val"),
            **_texts(cfg, settings),
            loader=settings.loader,
        )
    return get_class(cfg.data._target_)(
        checkpoint=checkpoint,
        export=settings.export,
        load_target=load_target,
        load_vision=load_vision,
        require_enough=partial(require_updates, cfg),
        train=source(cfg, "data.train"),
        val=source(cfg, "data.val"),
        **_texts(cfg, settings),
        root=Path(cfg.data.root).expanduser(),
        folder=Path(cfg.data.folder).expanduser() if cfg.data.folder else None,
        loader=settings.loader,
    )


def _texts(cfg: DictConfig, settings: Settings) -> dict[str, Any]:
    """The conversations without pictures that a curriculum adds; nothing where there is none, or no file is named."""
    node = cfg.data.get("texts")
    if getattr(settings.loader, "curriculum", None) is None or node is None:
        return {}
    if isinstance(node, DictConfig) and node.get("path", "") is None:
        return {}
    return {"texts": source(cfg, "data.texts")}


def prompts(cfg: DictConfig) -> Sequence[Conversation]:
    """The conversations of the benchmark, without those that ``benchmark.exclude`` was trained on.

    Raises:
        SettingError, FileNotFoundError: as :func:`source`.
        SourceError, ArtifactError: there is no manifest of a training where ``benchmark.exclude`` says.
    """
    asked = source(cfg, "benchmark.conversations")
    exclude = cfg.benchmark.get("exclude")
    return asked if exclude is None else NotTrainedOn(asked, TrainedOn(Path(exclude).expanduser()))


def trained_on(cfg: DictConfig, drafter: Path | None) -> str | None:
    """Where the data lie that the exported ``drafter`` was trained on, or is being trained on; None if nobody says."""
    if drafter is not None:
        record = read_record(drafter if drafter.is_dir() else drafter.parent)
        if (place := record.get("origin", {}).get(TRAINED_ON)) is not None:
            return place
    elif cfg.task != "train":
        return None
    return place_of(OmegaConf.select(cfg, "data.train"))


def source(cfg: DictConfig, where: str) -> Any:
    """Conversations that the node at ``where`` makes, the location of artifacts that it names, or None.

    Raises:
        SettingError: a path is not set.
        FileNotFoundError: there is nothing at the path.
    """
    node = OmegaConf.select(cfg, where)
    if not isinstance(node, DictConfig):
        return node
    for name, typed in OmegaConf.to_container(node, resolve=False).items():  # type: ignore[union-attr]
        if name in ("path", "folder") and node[name] is None:
            field = str(typed).strip("${}")  # the node takes it from where the user sets it
            raise SettingError(f"{field} is not set; give it on the command line: {field}=<path>")
    return instantiate(node)
