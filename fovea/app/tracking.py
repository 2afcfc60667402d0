"""Experiment trackers: checked before anything expensive, one run per job, closed however the job ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from fovea.app.typed import SettingError


def loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``; ``WANDB_MODE=disabled`` leaves W&B out.

    Raises:
        SettingError: W&B would ask for a key and nobody could type it.
    """
    built = []
    for node in (cfg.logger or {}).values():
        if str(node["_target_"]).endswith("WandbLogger"):
            if os.environ.get("WANDB_MODE") == "disabled":
                continue
            if not node.offline:
                _require_account()
        built.append(instantiate(node))
    return built


def log_settings(built: list[Logger], cfg: DictConfig) -> None:
    """Logs the resolved settings as a plain dictionary, without the paths of this machine."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    for name in ("paths", "logger"):
        plain.pop(name, None)
    for logger in built:
        logger.log_hyperparams(plain)


@contextmanager
def closed_at_end() -> Iterator[None]:
    """Finishes the W&B run, and takes back the mode that Lightning's offline logger leaves in the environment."""
    mode = os.environ.get("WANDB_MODE")
    failed = True
    try:
        yield
        failed = False
    finally:
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            wandb.finish(exit_code=int(failed))
        if mode is None:
            os.environ.pop("WANDB_MODE", None)
        else:
            os.environ["WANDB_MODE"] = mode


def _require_account() -> None:
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return
    import wandb

    if not wandb.api.api_key and not sys.stdin.isatty():
        raise SettingError(
            "W&B has no API key here and no terminal to ask for one: set WANDB_API_KEY, "
            "or choose logger=wandb_offline or logger=csv"
        )


def wandb_logger(built: list[Logger]) -> WandbLogger | None:
    """The W&B logger among ``built``, for tables and pictures."""
    return next((logger for logger in built if isinstance(logger, WandbLogger)), None)
