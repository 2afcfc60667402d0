"""Earlier runs, as ``resume=`` and ``ckpt=`` name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from fovea.app.inherit import CommandLine, inherit, parse
from fovea.app.launch import CONFIG_DIR
from fovea.app.outcome import FILE as OUTCOME
from fovea.app.outcome import Outcome
from fovea.app.resumable import require_checkpoint
from fovea.app.trust import refuse_code
from fovea.app.typed import SettingError
from fovea.drafters.checkpoint import CONFIG_FILE, read_record, require_drafter
from fovea.drafters.training_free import CONFIGS
from fovea.files import write_text

#: Where a run keeps what ``resume=`` continues from, and the drafter that ``ckpt=`` loads.
LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
DRAFTER = Path("drafter")
#: The configuration of a run with its interpolations, where Hydra puts it, and the same for readers, resolved.
CONFIG, RESOLVED_CONFIG = Path(".hydra") / "config.yaml", Path("config.yaml")
#: What was typed for a run, where Hydra puts it.
OVERRIDES = Path(".hydra") / "overrides.yaml"
#: Hydra empties its files when a job begins, also one that goes on in the folder of a killed one; these copies of the
#: two are replaced in one piece.
KEPT_CONFIG, KEPT_OVERRIDES = Path(".fovea") / "config.yaml", Path(".fovea") / "overrides.yaml"
#: What ``resume`` is set to where a run goes on in its own folder, and where that keeps its curves.
OWN_FOLDER, METRICS = "own", "metrics"
#: What always belongs to the new run.
OWN = ("task", "resume", "init_from", "paths", "ckpt", "method", "checkpoints", "diagnostics")


def continued(cfg: DictConfig, typed: CommandLine) -> tuple[DictConfig, Path | None]:
    """Settings and checkpoint of the run ``cfg.resume``; ``cfg`` itself and None if there is none.

    With ``resume=own`` it is the run in the folder of this one, which is begun if it has no checkpoint yet: so a
    command that a cluster starts again goes on.

    Raises:
        SettingError: no run, or one without a checkpoint, or with one that is damaged, or settings that run code.
    """
    if cfg.resume is None:
        return cfg, None
    if cfg.resume == OWN_FOLDER:
        folder = Path(cfg.paths.output_dir)
        if not (folder / LAST_CHECKPOINT).exists():
            return cfg, None
        require_checkpoint(folder / LAST_CHECKPOINT)
        set_aside_curves(folder)
        return cfg, folder / LAST_CHECKPOINT
    if cfg.init_from is not None:
        raise SettingError("init_from starts a new training and resume continues one; give one of them")
    run = Path(cfg.resume).expanduser()
    merged = inherit(cfg, saved_config(run), typed, [str(node) for node in cfg if node not in OWN])
    refuse_code(merged, cfg, run)
    if not (run / LAST_CHECKPOINT).exists():
        raise SettingError(f"{run} ended before its first checkpoint, {LAST_CHECKPOINT} is missing; start it anew")
    require_checkpoint(run / LAST_CHECKPOINT)
    return merged, run / LAST_CHECKPOINT


def earlier(cfg: DictConfig) -> Path | None:
    """Folder of the run that ``cfg.resume`` continues in a new one; None where there is none."""
    return None if cfg.resume in (None, OWN_FOLDER) else Path(cfg.resume).expanduser()


def initial_drafter(cfg: DictConfig) -> Path | None:
    """Folder of the drafter whose weights the training starts from; None if it starts from nothing.

    Raises:
        FileNotFoundError: there is none at ``cfg.init_from``.
        CheckpointError: it is another drafter's.
    """
    if cfg.init_from is None:
        return None
    source = Path(cfg.init_from).expanduser()
    if source.suffix == ".ckpt":
        raise SettingError(f"{source} resumes a training; init_from takes the run folder or its exported drafter")
    folder = source / DRAFTER if (source / CONFIG).is_file() else source
    require_drafter(folder, cfg.drafter.name)
    return folder


def evaluated(cfg: DictConfig, typed: CommandLine) -> tuple[DictConfig, Path | None]:
    """Settings and drafter of the evaluation of ``cfg.ckpt``, a run folder or an exported drafter.

    Without ``ckpt`` it is what lies in the folder ``cfg.checkpoints`` under the name of the method. A method without
    weights has None, and takes no settings over.

    Raises:
        SettingError: no checkpoint is named, it is that of another method, or the run's settings run code.
        FileNotFoundError: there is nothing where it should be.
    """
    chosen = cfg.drafter.name if cfg.method or "drafter" in typed.groups else None
    if chosen in CONFIGS:
        if cfg.ckpt is not None:
            raise SettingError(f"{cfg.method or chosen} drafts without weights and has no checkpoint; leave ckpt out")
        return cfg, None
    source = _named_checkpoint(cfg)
    run = next((folder for folder in (source, *source.parents) if (folder / CONFIG).is_file()), None)
    if source.suffix == ".ckpt":
        if run is None:
            raise SettingError(
                f"{source} resumes a training; give the folder of the exported drafter that lies beside it"
            )
        source = run  # its drafter is exported whenever the checkpoint is replaced
    drafter = run / DRAFTER if run is not None and source == run else source
    if chosen is not None:
        _refuse_other_method(cfg, drafter)
    if run is None:
        return cfg, drafter
    nodes = [
        str(node) for node in cfg if node not in (*OWN, "name", "tags", "logger", "trainer", "strategy", "callbacks")
    ]
    merged = inherit(cfg, saved_config(run), typed, nodes)
    refuse_code(merged, cfg, run)
    return merged, drafter


def evaluated_again(cfg: DictConfig, typed: CommandLine) -> tuple[DictConfig, CommandLine]:
    """Settings and command line of an evaluation that goes on from the one in ``cfg.resume``; else both as they are.

    They are composed from what was typed for that one and then for this one, and written into this one's folder, so
    that it can be resumed in its turn.

    Raises:
        SettingError: the folder holds no evaluation, one that was completed, or settings that run code.
    """
    if cfg.resume is None:
        write_overrides(Path(cfg.paths.output_dir), typed.overrides)
        return cfg, typed
    run = Path(cfg.resume).expanduser()
    typed_then = next((o for name in (KEPT_OVERRIDES, OVERRIDES) if (o := _loaded(run / name)) is not None), None)
    if typed_then is None or saved_config(run).task != "evaluate":
        raise SettingError(f"{run} holds no evaluation to resume; give the folder of an evaluate.py that was cut short")
    if (run / OUTCOME).is_file() and Outcome.read(run).status == "completed":
        raise SettingError(f"the evaluation in {run} was completed; measure again with what was typed for it")
    overrides = [str(o) for o in (*typed_then, *typed.overrides) if str(o).split("=", 1)[0] != "resume"]
    again = compose("evaluate", overrides=overrides)
    refuse_code(again, cfg, run)
    again.resume = cfg.resume
    write_overrides(Path(cfg.paths.output_dir), overrides)
    return again, parse(overrides, [str(group) for group in HydraConfig.get().runtime.choices])


@rank_zero_only
def write_overrides(folder: Path, overrides: list[str]) -> None:
    """Keeps ``overrides`` as what was typed for the run in ``folder``."""
    (folder / KEPT_OVERRIDES).parent.mkdir(parents=True, exist_ok=True)
    write_text(folder / KEPT_OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(overrides)))


def _named_checkpoint(cfg: DictConfig) -> Path:
    """What ``ckpt`` names, or ``checkpoints`` and the method together."""
    if cfg.ckpt is not None:
        source = Path(cfg.ckpt).expanduser()
        if not source.exists():
            raise FileNotFoundError(f"there is no checkpoint at {source}; give a run folder or an exported drafter")
        return source
    if cfg.checkpoints is None:
        raise SettingError(
            "ckpt is not set; give a run folder or an exported drafter: ckpt=outputs/<date>/<time>-fovea"
        )
    method = cfg.method or cfg.drafter.name
    source = Path(cfg.checkpoints).expanduser() / method
    if not source.exists():
        raise FileNotFoundError(
            f"there is no checkpoint of {method} at {source}; checkpoints=<folder> holds one run folder or exported "
            "drafter per method, named as the method"
        )
    return source


def _refuse_other_method(cfg: DictConfig, drafter: Path) -> None:
    """Refuses a checkpoint that is not of the method that was asked for.

    Its drafter is another one, or was trained without what the method's own file sets, such as a norm left out.
    """
    path = (drafter if drafter.is_dir() else drafter.parent) / CONFIG_FILE
    if not path.is_file():
        return  # loading it says so
    record = read_record(path.parent)
    wanted, held = cfg.drafter.name, record["drafter"]
    method = cfg.method or wanted
    if held != wanted:
        raise SettingError(
            f"{method} drafts with a {wanted} drafter, and the checkpoint at {drafter} holds a {held} drafter; give "
            f"one of its own, or choose method={held}"
        )
    file = CONFIG_DIR / "method" / f"{cfg.method}.yaml"
    for name in _leaves(OmegaConf.select(OmegaConf.load(file), "drafter")) if file.is_file() else ():
        given, trained = (OmegaConf.select(OmegaConf.create(c), name) for c in (cfg.drafter, record.get("config", {})))
        if given != trained:
            raise SettingError(
                f"{method} drafts with drafter.{name}={given}, and the checkpoint at {drafter} was trained with "
                f"{trained}; give one of its own"
            )


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all values below ``node``."""
    for name in node or ():
        below = OmegaConf.is_dict(node) and OmegaConf.is_dict(node[name])
        yield from _leaves(node[name], f"{prefix}{name}.") if below else (f"{prefix}{name}",)


def saved_config(run: Path) -> DictConfig:
    """The configuration of the run in the folder ``run``.

    Raises:
        SettingError: the folder holds no run, or one that ended while its settings were being written.
    """
    path = run / CONFIG
    if not path.is_file():
        raise SettingError(f"{run} is no run folder, {path} is missing; give one such as outputs/<date>/<time>-fovea")
    kept = _loaded(run / KEPT_CONFIG)
    config = _loaded(path) if kept is None else kept
    if not isinstance(config, DictConfig) or "task" not in config:
        raise SettingError(f"{path} is cut or damaged: the run ended while it began; start it anew")
    return config


def _loaded(path: Path) -> Any:
    """What the YAML file at ``path`` holds; None if it is cut or damaged."""
    try:
        return OmegaConf.load(path)
    except Exception:  # a parser of YAML fails in as many ways as a file can be damaged
        return None


@rank_zero_only
def record_settings(folder: Path, cfg: DictConfig) -> None:
    """Writes ``cfg`` into the run's ``folder``; it is what was composed plus what an earlier run has handed on."""
    for name in (CONFIG, KEPT_CONFIG):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, OmegaConf.to_yaml(cfg))
    write_text(folder / RESOLVED_CONFIG, OmegaConf.to_yaml(cfg, resolve=True))


@rank_zero_only
def set_aside_curves(run: Path) -> None:
    """Keeps what a run has logged before it was started again in its own folder: a logger begins its file anew."""
    logged = run / METRICS
    if logged.is_dir():
        number = 1 + sum(1 for _ in run.glob(f"earlier_{METRICS}_*"))
        logged.rename(run / f"earlier_{METRICS}_{number}")
