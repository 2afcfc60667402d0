"""All numbers of a job as validated dataclasses, before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from fovea.app.plugins import load_plugins
from fovea.app.typed import SettingError, build, convert
from fovea.artifacts.config import ExportConfig
from fovea.decoding.growth import TreeConfig
from fovea.decoding.selection import SelectionConfig
from fovea.drafters import training_free
from fovea.drafters.registry import drafter_type
from fovea.evaluation.speed_config import SpeedConfig
from fovea.targets.base import TargetSpec
from fovea.training.module import UnrollConfig
from fovea.training.objective import ObjectiveConfig


@dataclass(frozen=True)
class Settings:
    """The dataclasses of one job.

    Attributes:
        drafter: numbers of the drafter called ``cfg.drafter.name``.
        loader: how batches are made; the class is named in ``cfg.data.loader``.
        target_recipe: its ``build(cache)`` makes the target's checkpoint folder; None if it is not built here.
        online: the live target teaches in the training step; no artifacts.
        speed_eval: measure decoding speed while training and at its end.
        gates: run the gates before training.
        page: write a page over the run at its end.
        budget: visual budgets that an evaluation compares; None for none.
    """

    drafter: Any
    tree: TreeConfig
    selection: SelectionConfig
    speed: SpeedConfig
    objective: ObjectiveConfig
    unroll: UnrollConfig
    export: ExportConfig
    loader: Any
    target_recipe: Any
    online: bool
    speed_eval: bool
    gates: bool
    page: bool = True
    budget: Any = None


def read_settings(cfg: DictConfig) -> Settings:
    """The settings of ``cfg``.

    Raises:
        SettingError: for the first value that cannot be used, by name.
    """
    load_plugins(cfg)  # those of the run that this one continues or measures
    drafter, decode = _plain(cfg, "drafter"), _plain(cfg, "decode")
    selection = {name: value for name, value in decode.items() if name not in ("tree", "lookahead", "max_new_tokens")}
    name = drafter.pop("name")
    drafter_config = training_free.CONFIGS.get(name) or drafter_type(name).config_type
    settings = Settings(
        drafter=build(drafter_config, drafter, "drafter"),
        tree=build(TreeConfig, _plain(cfg, "decode.tree"), "decode.tree"),
        selection=build(SelectionConfig, selection, "decode"),
        speed=build(SpeedConfig, _plain(cfg, "speed"), "speed"),
        objective=build(ObjectiveConfig, _plain(cfg, "objective"), "objective"),
        unroll=build(UnrollConfig, _plain(cfg, "unroll"), "unroll"),
        export=build(ExportConfig, _plain(cfg, "data.export"), "data.export"),
        loader=build_named(cfg, "data.loader"),
        target_recipe=build_named(cfg, "model.build"),
        online=convert(cfg.data.online, bool, "data.online"),
        speed_eval=convert(cfg.speed_eval, bool, "speed_eval"),
        gates=convert(cfg.gates, bool, "gates"),
        page=convert(cfg.page, bool, "page"),
        budget=build_named(cfg, "diagnostics"),
    )
    if cfg.task == "train":
        accumulated = convert(cfg.trainer.accumulate_grad_batches, int, "trainer.accumulate_grad_batches")
        if accumulated < 1:
            raise SettingError(f"trainer.accumulate_grad_batches is {accumulated}; it must be at least 1")
    if name not in training_free.CONFIGS:
        deepest = settings.drafter.depth + 1
        if settings.unroll.steps is not None and settings.unroll.steps > deepest:
            raise SettingError(f"unroll.steps is {settings.unroll.steps}; drafter.depth allows 1 to {deepest}")
    return settings


def with_layers_read(settings: Settings, spec: TargetSpec) -> Settings:
    """``settings`` in which the target of ``spec`` teaches the layers that the drafter reads.

    Raises:
        SettingError: others are named in the export.
    """
    read, named = settings.drafter.layers_read(spec), settings.export.feature_layers
    if named and not set(read) <= set(named):
        raise SettingError(
            f"data.export.feature_layers is {list(named)} and the drafter reads layers {list(read)}; add them, or "
            "leave it empty"
        )
    return replace(settings, export=replace(settings.export, feature_layers=named or read))


def build_named(cfg: DictConfig, where: str) -> Any:
    """The dataclass that the node at ``where`` names in ``_target_``; None for an empty node."""
    if OmegaConf.select(cfg, where) is None:
        return None
    values = _plain(cfg, where)
    return build(get_class(values.pop("_target_")), values, where)


def _plain(cfg: DictConfig, where: str) -> dict[str, Any]:
    node = OmegaConf.select(cfg, where)
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if not isinstance(plain, Mapping):
        raise SettingError(f"{where} must hold named fields, got {plain!r}")
    return {str(key): value for key, value in plain.items()}
