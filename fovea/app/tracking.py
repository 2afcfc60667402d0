"""Experiment trackers: checked before anything expensive, one run per job, closed however the job ends."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from fovea.app.typed import SettingError


def loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``; ``WANDB_MODE=disabled`` leaves W&B out. Jobs of a sweep share a W&B group.

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
            built.append(instantiate(node, **_place_in_sweep(node)))
        else:
            built.append(instantiate(node))
    return built


def _place_in_sweep(node: DictConfig) -> dict[str, Any]:
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return {}
    short = [override.rsplit(".", 1)[-1] for override in hydra.overrides.task]
    return {"group": node.group or " ".join(Path(hydra.sweep.dir).parts[-2:]), "name": " ".join([node.name, *short])}


def log_settings(built: list[Logger], cfg: DictConfig) -> None:
    """Logs the resolved settings as a plain dictionary; of this machine's folders it says ``<output_dir>``."""
    shown = cfg.copy()
    for name in shown.paths:
        OmegaConf.update(shown, f"paths.{name}", f"<{name}>")
    plain: dict[str, Any] = OmegaConf.to_container(shown, resolve=True)  # type: ignore[assignment]
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
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun") or os.environ.get("WANDB_API_KEY") or sys.stdin.isatty():
        return
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(server).netloc)
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is None:
        raise SettingError(
            "W&B has no API key here and no terminal to ask for one: set WANDB_API_KEY or WANDB_MODE=offline, "
            "or choose logger=wandb_offline or logger=csv"
        )


def log_result(built: list[Logger], numbers: Mapping[str, float], run: Path) -> None:
    """Logs the headline ``numbers`` of a finished job and, to W&B, the pictures of its report in ``run``."""
    pictures = sorted([*run.glob("plots/*.png"), *run.glob("evaluation/final/*.png")])
    for logger in built:
        logger.log_metrics({f"final/{name}": value for name, value in numbers.items()})
        if isinstance(logger, WandbLogger):
            for picture in pictures:
                logger.log_image(f"final/{picture.stem}", [str(picture)])
        logger.save()
