"""Starts an entry point, and lists the choices when an override names nothing that exists."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fovea.app.typed import choices

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"
#: Choices that need a plugin of Hydra's: its module, and the extra that brings it.
EXTRAS = {
    "launch=joblib": ("hydra_joblib_launcher", "parallel-sweeps"),
    "launch=submitit_local": ("hydra_submitit_launcher", "slurm"),
    "launch=slurm": ("hydra_submitit_launcher", "slurm"),
    "launch=ray": ("hydra_ray_launcher", "ray"),
    "search=retrieval": ("hydra_optuna_sweeper", "optuna"),
}


def launch(main: Callable[[], object], config_name: str) -> None:
    """Runs the Hydra entry point ``main``; Hydra names an unknown field, we add what there is instead."""
    try:
        main()
    except SystemExit as stop:
        if stop.code and stop.code != 0:
            typed = sys.argv[1:]
            for line in (*missing_extras(typed), *unquoted(typed), *unknown_names(typed, config_name)):
                print(line, file=sys.stderr)
        raise


def composed(config_name: str, overrides: Iterable[str]) -> DictConfig:
    """The settings of a job with these overrides, where no entry point runs.

    Raises:
        hydra.errors.HydraException: an override cannot be used.
    """
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(config_name, overrides=list(overrides))


def missing_extras(arguments: list[str]) -> list[str]:
    """One sentence per choice whose Hydra plugin is not installed, which says how to install it."""
    return [
        f"{choice} needs a package that is not installed: pip install -e '.[{extra}]'"
        for choice, (plugin, extra) in EXTRAS.items()
        if choice in arguments and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None
    ]


def unquoted(arguments: list[str]) -> list[str]:
    """One sentence per override whose value holds a second ``=``, which Hydra takes for the start of another."""
    split = [argument.partition("=") for argument in arguments if not argument.startswith("-")]
    return [
        f"a value that holds '=' needs two pairs of quotes: '{name}=\"{value}\"'"
        for name, _, value in split
        if "=" in value and not value.startswith(("'", '"', "[", "{"))
    ]


def unknown_names(arguments: list[str], config_name: str) -> list[str]:
    """One sentence per override whose field does not exist in the composed configuration."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            typed = OverridesParser.create().parse_overrides([a for a in arguments if not a.startswith("-")])
            groups = compose(config_name, return_hydra_config=True).hydra.runtime.choices
            chosen = [str(t.input_line) for t in typed if t.key_or_group in groups and not t.is_sweep_override()]
            cfg = compose(config_name, overrides=chosen)
        except HydraException:
            return []  # Hydra has already listed the options of the group
    fields = [t.key_or_group for t in typed if not t.is_add() and not t.key_or_group.startswith("hydra")]
    return [line for key in fields if key not in groups and (line := _unknown(cfg, key))]


def _unknown(cfg: DictConfig, key: str) -> str | None:
    node, walked = cfg, "the configuration"
    for name in key.split("."):
        if not isinstance(node, DictConfig):
            return None
        if name not in node:
            return f"{walked} has no field '{name}'{choices(name, [str(k) for k in node])}"
        walked = name if node is cfg else f"{walked}.{name}"
        node = OmegaConf.select(node, name, throw_on_missing=False, throw_on_resolution_failure=False)
    return None
