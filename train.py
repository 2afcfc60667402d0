"""Trains a drafter and measures it: ``python train.py``, ``python train.py model=qwen25vl experiment=fovea``.

Settings are composed from ``conf/train.yaml``; see ``python train.py --help``.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from fovea.app.launch import launch


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """One training job; returns the metric that sweepers look at."""
    from fovea.app.job import run_job
    from fovea.app.train_task import train

    return run_job(cfg, train)


if __name__ == "__main__":
    launch(main, "train")
