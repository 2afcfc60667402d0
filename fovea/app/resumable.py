"""Looks at what a training is resumed from before anything expensive; what cannot be is refused in a sentence."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fovea.app.typed import SettingError

#: What :class:`fovea.training.module.DrafterModule` and Lightning keep, and look up without asking: of which type, and
#: of which type what it holds is.
_KEPT: dict[str, tuple[Any, ...]] = {
    "state_dict": (Mapping, Tensor),
    "optimizer_states": (list, Mapping),
    "lr_schedulers": (list, Mapping),
    "loops": (Mapping, Mapping),
    "callbacks": (Mapping, Mapping),
    "global_step": (int,),
    "micro_batch": (int,),
    "drafter": (Mapping, str | Mapping),
}
#: Where Lightning counts epochs and batches, and what it counts of each.
_PROGRESS = ("epoch_progress", "epoch_loop.batch_progress")
_COUNTERS = {"ready", "started", "processed", "completed"}
#: Types, below ``deepspeed``, of what it keeps beside tensors.
_DEEPSPEED = (
    "runtime.fp16.loss_scaler.LossScaler",
    "runtime.fp16.loss_scaler.DynamicLossScaler",
    "runtime.zero.config.ZeroStageEnum",
    "utils.tensor_fragment.fragment_address",
)


def require_checkpoint(path: Path) -> None:
    """Refuses a checkpoint that is cut or damaged, or of something else.

    The file is a zip archive with a CRC-32 of every tensor in it; they are compared, which takes about as long as
    reading the file. Only plain types and tensors are made of it: it cannot run code. So it is with the files of a
    folder that DeepSpeed writes, and a few of its own types beside these: it reads them itself without asking.

    Raises:
        SettingError: naming the file and what is wrong.
    """
    remedy = "copy it again, resume an earlier run, or start from its exported drafter with init_from"
    if path.is_dir():
        _require_folder(path, remedy)
        return  # DeepSpeed itself compares what is in it
    _require_whole(path, remedy)
    checkpoint = _loaded(path, remedy)
    if not isinstance(checkpoint, Mapping):
        raise SettingError(f"{path} is no checkpoint of a training, but a {type(checkpoint).__name__}; {remedy}")
    if lacking := sorted(_KEPT.keys() - checkpoint.keys()):
        raise SettingError(f"{path} is no checkpoint of a training: it lacks {', '.join(lacking)}; {remedy}")
    wrong = [name for name, types in _KEPT.items() if not _is(checkpoint[name], *types)]
    if not wrong and not _counts(checkpoint["loops"].get("fit_loop", {})):
        wrong = ["loops"]
    if wrong:
        raise SettingError(f"{path} is no checkpoint of a training: {', '.join(wrong)} cannot be used; {remedy}")


def _is(value: Any, kind: type, inner: Any = None) -> bool:
    """Whether ``value`` is a ``kind``, and all that it holds an ``inner``."""
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    held = value.values() if isinstance(value, Mapping) else value
    return inner is None or all(isinstance(item, inner) for item in held)


def _counts(loop: Mapping[str, Any]) -> bool:
    """Whether a training loop says how far it has come, in epochs, batches and samples."""
    held = loop.get("state_dict")
    if not isinstance(held, Mapping) or not _is(held.get("combined_loader", []), list, Mapping):
        return False
    for name in _PROGRESS:
        progress = loop.get(name)
        for part in ("total", "current"):
            counters = progress.get(part, {}) if isinstance(progress, Mapping) else {}
            if not _is(counters, Mapping, int) or not counters.keys() >= _COUNTERS:
                return False
    return True


def _require_folder(path: Path, remedy: str) -> None:
    """Refuses a folder of DeepSpeed with a file that is damaged or could run code, or that leads out of the folder."""
    files = [Path(at) / name for at, _, names in os.walk(path, followlinks=True) for name in names]
    states = [file for file in files if file.suffix == ".pt"]
    if not any(file.name.endswith("model_states.pt") for file in states):
        raise SettingError(f"{path} is no checkpoint of DeepSpeed: it holds no model states; {remedy}")
    for file in files:
        if file.name.startswith("latest"):  # it names the folder within that is read
            tag = file.read_text(encoding="utf-8", errors="replace").strip()
            if Path(tag).name != tag or tag == "..":
                raise SettingError(f"{file} leads out of {path}, to {tag[:200]!r}; {remedy}")
    for file in sorted(states):
        _require_whole(file, remedy)
        _loaded(file, remedy, _deepspeed_types())


def _deepspeed_types() -> list[tuple[type, str]]:
    """Types of DeepSpeed's in its files, all of which only hold values; none if it is not installed."""
    found = []
    for name in _DEEPSPEED:
        module, _, kind = f"deepspeed.{name}".rpartition(".")
        with suppress(ImportError, AttributeError):
            found.append((getattr(importlib.import_module(module), kind), f"{module}.{kind}"))
    return found


def _loaded(path: Path, remedy: str, types: Sequence[tuple[type, str]] = ()) -> Any:
    """What an archive holds, its tensors mapped; plain types, and ``types`` with their names."""
    try:
        with torch.serialization.safe_globals(list(types)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling what is no checkpoint fails in as many ways as there are
        raise SettingError(f"{path} is no checkpoint of plain types and tensors ({_first(error)}); {remedy}") from error


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
