"""Experiment trackers: checked before anything expensive, one run per job, closed however the job ends."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from fovea.app.provenance import provenance
from fovea.app.tracked import evaluation_tables, page_for_wandb, plots_for_wandb, sweep_tables, tables_for_wandb
from fovea.app.typed import SettingError
from fovea.app.untold import Untold
from fovea.evaluation.history import EVALUATIONS, FINAL
from fovea.evaluation.page.build import PAGE
from fovea.evaluation.page.entries import find_entries
from fovea.evaluation.page.take_along import PageTables
from fovea.evaluation.results import SpeedResult

#: What trackers are told of where a run comes from.
_TOLD = ("commit", "dirty", "started", "python", "platform", "cpus", "gpus", "versions")


def loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``; ``WANDB_MODE=disabled`` leaves W&B out. Jobs of a sweep share a W&B group.

    Raises:
        SettingError: W&B would ask for a key and nobody could type it.
    """
    built = []
    for node in (cfg.logger or {}).values():
        if _is_wandb(node):
            if os.environ.get("WANDB_MODE") == "disabled":
                continue
            if not node.offline:
                _require_account()
            built.append(instantiate(node, **place_in_sweep(node)))
        else:
            built.append(instantiate(node))
    return built


def place_in_sweep(node: DictConfig) -> dict[str, str]:
    """Group and name in W&B of a job in a sweep, where the logger ``node`` is one of W&B; nothing else has a place."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN or not _is_wandb(node):
        return {}
    typed = [override.partition("=") for override in hydra.overrides.task]
    untold = Untold({})
    short = [f"{field.rsplit('.', 1)[-1]}={untold.settings(value)}" for field, _, value in typed]
    return {"group": node.group or _group(Path(hydra.sweep.dir)), "name": " ".join([node.name, *short])}


def _is_wandb(node: DictConfig) -> bool:
    return str(node["_target_"]).endswith("WandbLogger")


def log_settings(built: list[Logger], cfg: DictConfig) -> None:
    """Logs the resolved settings as a plain dictionary, and commit and versions; of this machine's folders only names.

    The run's own are called ``<output_dir>`` and ``<cache>``.
    """
    shown = cfg.copy()
    untold = Untold({str(name): str(path) for name, path in cfg.paths.items()})
    for name in shown.paths:
        OmegaConf.update(shown, f"paths.{name}", f"<{name}>")
    plain: dict[str, Any] = OmegaConf.to_container(shown, resolve=True)  # type: ignore[assignment]
    for name in ("paths", "logger"):
        plain.pop(name, None)
    told = {name: value for name, value in provenance().items() if name in _TOLD}
    for logger in built:
        logger.log_hyperparams(untold.settings(plain) | {"provenance": told})


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


def log_result(built: list[Logger], result: SpeedResult, run: Path) -> None:
    """Logs a finished job: headline numbers and, to W&B, tables, the page and the pictures that lie in ``run``."""
    numbers = result.summary()
    folder = run / EVALUATIONS / FINAL
    pictures = sorted([*run.glob("plots/*.png"), *folder.glob("*.png")])
    for logger in built:
        logger.log_metrics({f"final/{name}": value for name, value in numbers.items()})
        if isinstance(logger, WandbLogger):
            for picture in pictures:
                logger.log_image(f"final/{picture.stem}", [str(picture)])
            record = tables_for_wandb(evaluation_tables(result, folder), "final")
            if (run / PAGE).is_file():
                record["final/page"] = page_for_wandb(run / PAGE, Untold({"output_dir": run}))
            logger.experiment.log(record)
        logger.save()


def log_sweep(
    config: DictConfig, folder: Path, summary: Sequence[Sequence[str]], shown: Sequence[Path] | None = None
) -> None:
    """A run of its own in the W&B group of a finished sweep: its summary, and its page with all tables and plots.

    Nothing where the jobs tell W&B nothing.

    Args:
        config: the sweep's, with Hydra's node.
        folder: of the sweep.
        summary: heading and a row per job.
        shown: what the page is about, where that is not the folder.
    """
    node = (config.get("logger") or {}).get("wandb")
    if node is None or os.environ.get("WANDB_MODE") == "disabled":
        return
    group = OmegaConf.select(node, "group", default=None) or _group(folder)
    with closed_at_end():
        logger = instantiate(node, save_dir=str(folder), name=f"{group} summary", group=group, job_type="sweep")
        untold = Untold({"sweep": folder})
        try:
            entries, _ = find_entries(shown or [folder])
        except FileNotFoundError:
            entries = []
        tables = PageTables.over(entries) if entries else None
        record = tables_for_wandb(sweep_tables(summary, entries, tables, untold), "sweep")
        if (folder / PAGE).is_file():
            record["sweep/page"] = page_for_wandb(folder / PAGE, untold)
        if tables is not None:
            record |= plots_for_wandb(tables, untold, "sweep/plots")
        logger.experiment.log(record)
        for picture in sorted(folder.glob("*.png")):
            logger.log_image(f"sweep/{picture.stem}", [str(picture)])


def _group(folder: Path) -> str:
    """The W&B group of the sweep in ``folder``."""
    return " ".join(folder.parts[-2:])
