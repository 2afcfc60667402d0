"""One job: a run of an entry point, alone or within a sweep, from its folder to its exit code."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fovea.app import errors, tracking
from fovea.app.inherit import command_line
from fovea.app.logs import FILE_ONLY
from fovea.app.provenance import write_provenance
from fovea.app.typed import SettingError

log = logging.getLogger("fovea")

#: File in a job's folder that tells a sweep how the job ended.
OUTCOME = "outcome.json"


def run_job(cfg: DictConfig, task: Callable[[DictConfig], Mapping[str, float]]) -> float | None:
    """Runs ``task`` and records where it came from and how it ended.

    Trackers are closed however it ends. A failure leaves its traceback in the job's log; alone the job then exits with
    1, in a sweep it lets the others run, and the sweep exits with 1.

    Returns:
        The metric named by ``optimized_metric``, for sweepers that search.
    """
    folder = Path(cfg.paths.output_dir)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    first_rank = int(os.environ.get("LOCAL_RANK", 0)) == 0 and int(os.environ.get("SLURM_PROCID", 0)) == 0
    outcome: dict[str, Any] = {"overrides": command_line().overrides, "status": "interrupted", "metrics": {}}
    try:
        if first_rank:
            write_provenance(folder)
        if in_sweep:
            require_one_device(cfg)
        with tracking.closed_at_end():
            metrics = dict(task(cfg))
        outcome |= {"status": "completed", "metrics": metrics}
    except Exception as raised:
        error = errors.cause(raised)
        outcome |= {"status": "failed", "error": str(error)}
        if errors.is_user_error(error):
            log.error("%s", error, exc_info=error, extra={FILE_ONLY: True})
        else:
            log.error("The job failed: %s", error, exc_info=raised)
        if not in_sweep:
            raise SystemExit(1) from None
        return None
    except (KeyboardInterrupt, SystemExit):
        log.error("Interrupted; what was reached lies in %s", folder)
        raise
    finally:
        if first_rank:
            (folder / OUTCOME).write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    return metrics.get(cfg.optimized_metric)


def require_one_device(cfg: DictConfig) -> None:
    """Refuses a sweep over several devices: each child process would run the whole sweep again."""
    devices = OmegaConf.select(cfg, "trainer.devices", default=1)
    if devices not in (1, "1", [0]) or OmegaConf.select(cfg, "trainer.num_nodes", default=1) != 1:
        raise SettingError(
            f"trainer.devices is {devices}: a job of a sweep uses one device; add trainer.devices=1, "
            "or run the settings one by one"
        )
