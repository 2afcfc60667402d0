"""One job: a run of an entry point, alone or within a sweep, from its folder to its exit code."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fovea.app import errors, tracking
from fovea.app.apart import ApartError, run_apart, runs_apart
from fovea.app.inherit import command_line
from fovea.app.logs import FILE_ONLY, quiet_lightning
from fovea.app.outcome import Outcome
from fovea.app.plugins import load_plugins
from fovea.app.provenance import write_provenance
from fovea.app.watch import watch_first, watch_sweep
from fovea.files import DiskFullError

#: Exit code of a job that Ctrl-C ended, by the shells' convention.
INTERRUPTED = 130

log = logging.getLogger("fovea")


def run_job(cfg: DictConfig, task: FunctionType) -> Any:
    """Runs ``task`` and records where it came from and how it ended.

    Trackers are closed however it ends. A failure leaves its traceback in the job's log; alone the job then exits with
    1, in a sweep it lets the others run, and the sweep exits with 1. A job of a sweep runs in a process of its own, so
    that this holds whatever ends it.

    Returns:
        The metric named by ``optimized_metric``, or a list of several, for sweepers that search; None where it is
        missing.
    """
    folder = Path(cfg.paths.output_dir)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    outcome = Outcome(command_line().overrides)
    quiet_lightning()
    watch_first(folder)
    watch_sweep(folder)
    try:
        if _first_process():
            write_provenance(folder)
            outcome.write(folder)  # what is killed was interrupted
        if in_sweep and runs_apart(cfg):
            outcome.metrics = run_apart(cfg, task)
        else:
            load_plugins(cfg)
            with tracking.closed_at_end():
                outcome.metrics = dict(task(cfg))
        outcome.status = "completed"
    except ApartError as raised:
        outcome.status, outcome.error = "failed", str(raised)
    except Exception as raised:
        error = errors.cause(raised)
        outcome.status, outcome.error = "failed", errors.sentence(error, folder)
        if errors.is_user_error(error):
            log.error("%s", outcome.error, exc_info=error, extra={FILE_ONLY: True})
        else:
            log.error("The job failed: %s", error, exc_info=raised)
        if not in_sweep:
            raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit):
        log.error("%s", f"Interrupted. {errors.going_on(folder)}".rstrip())
        raise SystemExit(INTERRUPTED) from None
    finally:
        if _first_process():
            with suppress(DiskFullError):  # what there was to say of it has been said
                outcome.write(folder)
                if outcome.status == "completed":
                    _let_go(folder)
    return outcome.optimized(cfg.optimized_metric)


def _let_go(folder: Path) -> None:
    """Removes the answers by which a job that was killed would have gone on."""
    from fovea.evaluation.history import EVALUATIONS, FINAL
    from fovea.evaluation.unfinished import discard_answers

    discard_answers(folder / EVALUATIONS / FINAL)


def _first_process() -> bool:
    """Whether no launcher has given this process a rank above 0; there is no process group yet to ask."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
