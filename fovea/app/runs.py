"""Earlier runs, as ``resume=`` and ``ckpt=`` name them."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from fovea.app.inherit import CommandLine, inherit
from fovea.app.typed import SettingError

#: Where a run keeps what ``resume=`` continues from, and the drafter that ``ckpt=`` loads.
LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
DRAFTER = Path("drafter")
#: What always belongs to the new run.
OWN = ("task", "resume", "paths", "ckpt")


def continued(cfg: DictConfig, typed: CommandLine) -> tuple[DictConfig, Path | None]:
    """Settings and checkpoint of the run ``cfg.resume``; ``cfg`` itself and None if there is none.

    Raises:
        SettingError: no run, or one without a checkpoint.
    """
    if cfg.resume is None:
        return cfg, None
    run = Path(cfg.resume).expanduser()
    merged = inherit(cfg, run, typed, [str(node) for node in cfg if node not in OWN])
    if not (run / LAST_CHECKPOINT).is_file():
        raise SettingError(f"{run} ended before its first checkpoint, {LAST_CHECKPOINT} is missing; start it anew")
    return merged, run / LAST_CHECKPOINT


def evaluated(cfg: DictConfig, typed: CommandLine) -> tuple[DictConfig, Path]:
    """Settings and drafter of the evaluation of ``cfg.ckpt``, a run folder or an exported drafter.

    Raises:
        SettingError: no checkpoint is named.
        FileNotFoundError: there is nothing where it should be.
    """
    if cfg.ckpt is None:
        raise SettingError(
            "ckpt is not set; give a run folder or an exported drafter: ckpt=outputs/<date>/<time>-fovea"
        )
    source = Path(cfg.ckpt).expanduser()
    if not source.exists():
        raise FileNotFoundError(f"there is no checkpoint at {source}; give a run folder or an exported drafter")
    run = next((folder for folder in (source, *source.parents) if (folder / ".hydra" / "config.yaml").is_file()), None)
    if run is None:
        return cfg, source
    nodes = [str(node) for node in cfg if node not in (*OWN, "name", "tags", "logger", "trainer", "callbacks")]
    return inherit(cfg, run, typed, nodes), run / DRAFTER if source == run else source
