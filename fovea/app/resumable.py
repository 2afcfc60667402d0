"""Looks at what a training is resumed from before anything expensive; what cannot be is refused in a sentence."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from fovea.app.typed import SettingError

#: What :class:`fovea.training.module.DrafterModule` and Lightning keep, and look up without asking.
_KEPT = {
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "callbacks",
    "global_step",
    "micro_batch",
    "drafter",
}


def require_checkpoint(path: Path) -> None:
    """Refuses a checkpoint that is cut or damaged, or of something else.

    The file is a zip archive with a CRC-32 of every tensor in it; they are compared, which takes about as long as
    reading the file. Only plain types and tensors are made of it: it cannot run code. Of the folder that DeepSpeed
    writes the files are compared alone.

    Raises:
        SettingError: naming the file and what is wrong.
    """
    remedy = "copy it again, resume an earlier run, or start from its exported drafter with init_from"
    if path.is_dir():
        files = sorted(path.rglob("*.pt"))
        if not any(file.name.endswith("model_states.pt") for file in files):
            raise SettingError(f"{path} is no checkpoint of DeepSpeed: it holds no model states; {remedy}")
        for file in files:
            _require_whole(file, remedy)
        return  # DeepSpeed itself compares what is in them
    _require_whole(path, remedy)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        lacking = sorted(_KEPT - checkpoint.keys())
        empty = [name for name in ("state_dict", "loops", "drafter") if not isinstance(checkpoint.get(name), Mapping)]
    except Exception as error:  # unpickling what is no checkpoint fails in as many ways as there are
        raise SettingError(f"{path} is no checkpoint of plain types and tensors ({_first(error)}); {remedy}") from error
    if lacking or empty:
        raise SettingError(f"{path} is no checkpoint of a training: it lacks {', '.join(lacking or empty)}; {remedy}")


def _require_whole(path: Path, remedy: str) -> None:
    """Refuses an archive that is cut or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # a damaged archive raises errors of zipfile, struct, zlib and others
        raise SettingError(f"{path} is cut, damaged or no checkpoint ({error}); {remedy}") from error
    if broken is not None:
        raise SettingError(f"{path} is damaged: the CRC-32 of {broken} is another; {remedy}")


def _first(error: Exception) -> str:
    """The first line of a message: torch goes on with advice that would switch its protection off."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
