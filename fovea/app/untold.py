"""Keeps folders of this machine out of what is sent elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.app.launch import CONFIG_DIR


class Untold:
    """Replaces folders by words.

    Args:
        folders: word -> folder, such as ``output_dir`` and the run's own; beside them the folder of the program, the
            one in which it was started and the user's own are never told.
    """

    def __init__(self, folders: Mapping[str, Path | str]) -> None:
        known = dict(folders) | {"project": CONFIG_DIR.parent, "here": Path.cwd(), "home": Path.home()}
        pairs = []
        for word, folder in known.items():
            for path in {str(folder), os.path.abspath(folder), os.path.realpath(folder)}:
                if len(path) > 1 and path.startswith(os.sep):
                    pairs.append((path, f"<{word}>"))
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))  # a folder before those that it lies in

    def text(self, text: str) -> str:
        """``text`` with those folders replaced wherever they stand."""
        for path, word in self._pairs:
            text = text.replace(path, word)
        return text

    def settings(self, value: Any) -> Any:
        """Nested settings; of any other absolute path only the last part is told, behind ``<elsewhere>``."""
        if isinstance(value, Mapping):
            return {key: self.settings(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.settings(one) for one in value]
        if not isinstance(value, str):
            return value
        told = self.text(os.path.expanduser(value))
        return f"<elsewhere>/{Path(told).name}" if os.path.isabs(told) else told
