"""Modules of the user's own, imported before a job begins, so that what they register is known by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from fovea.app.typed import SettingError, convert


def load_plugins(cfg: DictConfig) -> None:
    """Imports the modules named in ``cfg.plugins``, each once; the working directory is searched like any other path.

    Raises:
        SettingError: there is no such module, or something that it imports is missing.
    """
    here = str(Path.cwd())
    if cfg.plugins and here not in sys.path:
        sys.path.append(here)
    named = list(cfg.plugins) if isinstance(cfg.plugins, ListConfig) else cfg.plugins
    for name in convert(named, list[str], "plugins"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            lacking = "it is not found" if error.name == name else f"it imports {error.name}, which is not found"
            raise SettingError(
                f"plugins names the module '{name}', and {lacking}; start where it lies, or extend PYTHONPATH"
            ) from error
