"""An entry point over the real settings whose task is cheap: it logs to the trackers, and some seeds end it.

13 and 14 raise; 15 kills its own process, and 16 the one that has started it.
"""

from __future__ import annotations

import logging
import os
import signal
import time

import hydra
from omegaconf import DictConfig

from fovea.app import tracking
from fovea.app.job import run_job
from fovea.app.launch import CONFIG_DIR, launch
from fovea.app.typed import SettingError


def task(cfg: DictConfig) -> dict[str, float]:
    loggers = tracking.loggers(cfg)
    tracking.log_settings(loggers, cfg)
    for logger in loggers:
        logger.log_metrics({"tau": float(cfg.seed)}, step=0)
        logger.save()
    logging.getLogger("fovea").info("seed %d, GPUs %s", cfg.seed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if cfg.seed == 13:
        raise SettingError("seed is 13; choose a lucky one")
    if cfg.seed == 14:
        return {"tau": 1 / 0}
    if cfg.seed in (15, 16):
        os.kill(os.getpid() if cfg.seed == 15 else os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return {"tau": float(cfg.seed), "decode_speedup": 2.0}


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def main(cfg: DictConfig) -> float | None:
    return run_job(cfg, task)


if __name__ == "__main__":
    launch(main, "train")
