"""Where the data of a job come from: the data module, and the prompts on which speed is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_class, instantiate
from lightning import LightningDataModule
from omegaconf import DictConfig

from fovea.app.settings import Settings, require_filled
from fovea.targets.base import Target
from fovea.targets.conversation import Conversation


def make_datamodule(
    cfg: DictConfig, settings: Settings, checkpoint: Path, load_target: Callable[[], Target]
) -> LightningDataModule:
    """The data module of ``cfg.data``; it exports what ``load_target`` teaches where artifacts are missing."""
    return get_class(cfg.data._target_)(
        checkpoint=checkpoint,
        export=settings.export,
        load_target=load_target,
        train=source(cfg, "data.train"),
        val=source(cfg, "data.val"),
        root=Path(cfg.data.root).expanduser(),
        folder=Path(cfg.data.folder).expanduser() if cfg.data.folder else None,
        loader=settings.loader,
    )


def prompts(cfg: DictConfig) -> Sequence[Conversation]:
    """The conversations of the benchmark."""
    return source(cfg, "benchmark.conversations")


def source(cfg: DictConfig, where: str) -> Any:
    """Conversations that the node at ``where`` makes, the location of artifacts that it names, or None.

    Raises:
        SettingError: a path is not set.
        FileNotFoundError: there is nothing at the path.
    """
    require_filled(cfg, where)
    group, field = where.split(".")
    node = cfg[group][field]
    return instantiate(node) if isinstance(node, DictConfig) else node
