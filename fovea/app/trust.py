"""What the settings of a folder may set in motion: nothing but this program's own parts, unless it is typed again.

A run folder may come from anybody, and ``ckpt=`` and ``resume=`` take its settings over. Modules, classes and commands
that these name would be run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from fovea.app.launch import CONFIG_DIR
from fovea.app.typed import SettingError
from fovea.artifacts.transport import runs_command

#: Packages whose classes do no more than their names say.
_PARTS = (
    *("fovea", "datamodules", "callbacks", "torch.optim"),
    *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "plugins", "profilers", "strategies")),
)
#: Data sets of a hub, which are read without a shell.
_HUB = re.compile(r"hf://[\w./@-]+")
#: Levels of settings; more there are only where interpolations lead back to what holds them.
_DEEPEST = 20


def refuse_code(merged: DictConfig, composed: DictConfig, folder: Path) -> None:
    """Refuses settings ``merged`` with those of ``folder`` that run what is neither in ``composed`` nor our own.

    ``composed`` is what was typed, with the files of ``conf`` and of the user's own folders: these are trusted.

    Raises:
        SettingError: a module, class or command of the folder's; what to type is named.
    """
    trusted = set(_leaves(composed))
    known = _targets() | {str(value) for where, value in trusted if where.endswith("_target_")}
    plugins = {str(value) for where, value in trusted if where.split("[")[0] == "plugins"}
    for where, value in _leaves(merged):
        if where.count(".") > _DEEPEST:
            raise SettingError(f"the settings in {folder} name each other in a circle, at {where[:200]}; start anew")
        if (where, value) in trusted or not isinstance(value, str):
            continue
        if where.split("[")[0] == "plugins" and value not in plugins:
            raise _refusal(folder, f"the module '{value}'", f"plugins=[{value}]")
        if where.endswith("_target_") and value not in known and not _is_part(value, plugins):
            raise _refusal(folder, f"'{value}'", f"++{where}={value}")
        if runs_command(value) and not _HUB.fullmatch(value):
            raise _refusal(folder, f"the command '{value}'", f'{where}="{value}"')


def _refusal(folder: Path, what: str, typed: str) -> SettingError:
    return SettingError(
        f"the settings in {folder} would run {what}, and what is read does not run code; if you trust it, type it "
        f"again: '{typed}'"
    )


def _leaves(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything below ``node`` that has a value; of a circle, one that is too deep."""
    if where.count(".") > _DEEPEST:
        yield where, node
        return
    if isinstance(node, DictConfig) and not node._is_none():
        places: list[tuple[Any, str]] = [(key, f"{where}.{key}" if where else str(key)) for key in node]
    elif isinstance(node, ListConfig) and not node._is_none():
        places = [(index, f"{where}[{index}]") for index in range(len(node))]
    else:
        yield where, node
        return
    for key, place in places:
        try:
            below = node[key]
        except OmegaConfBaseException:
            continue  # without a value it is of no use to anybody
        yield from _leaves(below, place)


def _targets() -> set[str]:
    """Everything that the files of ``conf`` name."""
    texts = (path.read_text(encoding="utf-8") for path in CONFIG_DIR.rglob("*.yaml"))
    return {name for text in texts for name in re.findall(r"_target_: *([\w.]+)", text)}


def _is_part(name: str, plugins: set[str]) -> bool:
    """Whether ``name`` is that of a class of ours, of an optimizer, of a part of Lightning's, or of a typed plugin."""
    package = next((p for p in (*_PARTS, *plugins) if name.startswith(f"{p}.")), None)
    if package is None:
        return False
    try:
        kind = get_class(name)
    except Exception:  # it names no class, or its module fails
        return False
    # A module also has what it imports: os, subprocess.
    return f"{kind.__module__}.".startswith(f"{package}.")
