"""Earlier runs, as ``resume=`` and ``ckpt=`` name them."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from fovea.app.inherit import CommandLine, inherit
from fovea.app.typed import SettingError

#: Where a run keeps what ``resume=`` continues from, and the drafter that ``ckpt=`` loads.
LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
DRAFTER = Path("drafter")
#: The configuration of a run with its interpolations, where Hydra puts it, and the same for readers, resolved.
CONFIG, RESOLVED_CONFIG = Path(".hydra") / "config.yaml", Path("config.yaml")
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
    merged = inherit(cfg, saved_config(run), typed, [str(node) for node in cfg if node not in OWN])
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
    run = next((folder for folder in (source, *source.parents) if (folder / CONFIG).is_file()), None)
    if source.suffix == ".ckpt":
        if run is None:
            raise SettingError(
                f"{source} resumes a training; give the folder of the exported drafter that lies beside it"
            )
        source = run  # its drafter is exported whenever the checkpoint is replaced
    if run is None:
        return cfg, source
    nodes = [str(node) for node in cfg if node not in (*OWN, "name", "tags", "logger", "trainer", "callbacks")]
    return inherit(cfg, saved_config(run), typed, nodes), run / DRAFTER if source == run else source


def saved_config(run: Path) -> DictConfig:
    """The configuration of the run in the folder ``run``.

    Raises:
        SettingError: the folder holds no run.
    """
    path = run / CONFIG
    if not path.is_file():
        raise SettingError(f"{run} is no run folder, {path} is missing; give one such as outputs/<date>/<time>-fovea")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


@rank_zero_only
def record_settings(folder: Path, cfg: DictConfig) -> None:
    """Writes ``cfg`` into the run's ``folder``; it is what was composed plus what an earlier run has handed on."""
    (folder / CONFIG).parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / CONFIG)
    OmegaConf.save(cfg, folder / RESOLVED_CONFIG, resolve=True)
