"""Drafter checkpoints: a folder with ``config.json`` (plain types) and ``model.safetensors`` (the drafter alone).

Both carry a CRC-32 that is compared when they are read. The config holds all that a drafter depends on: its own
numbers, the target's, and how it was taught. No weight of the target is in the file, so a drafter can only be loaded
beside its target, and another one is refused by name.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fovea.drafters.base import Drafter
from fovea.drafters.plain import from_plain, merged
from fovea.drafters.registry import drafter_type
from fovea.drafters.weights_file import CheckpointError, read_weights, write_weights
from fovea.files import replacing
from fovea.targets.base import TargetSpec
from fovea.targets.head import TargetHead

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_TRAIN_ANEW = "train one for this target: python train.py model=... model.path=<folder>"


@dataclass(frozen=True)
class Teaching:
    """What a drafter learned from.

    Attributes:
        mid_layers: target layers that the mid states were chosen from.
        target_fingerprint: hash of the target's weights.
        processor: settings of its processor by dotted name.
    """

    mid_layers: tuple[int, ...] = ()
    target_fingerprint: str = ""
    processor: Mapping[str, Any] = field(default_factory=dict)


def save_drafter(
    folder: Path | str,
    drafter: Drafter,
    teaching: Teaching | None = None,
    weights: Mapping[str, Tensor] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Writes ``drafter`` into ``folder``; what lies there of an earlier one is replaced.

    ``weights`` are its own, where those of the module are parts or a rounded copy, see :mod:`fovea.drafters.whole`;
    ``origin`` says where it comes from, for readers only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held = drafter.state_dict() if weights is None else weights
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in held.items()}
    record = {
        "drafter": drafter.name,
        "config": asdict(drafter.config),
        "target": asdict(drafter.spec),
        "feature_layers": drafter.feature_layers,
        "teaching": asdict(teaching or Teaching()),
        "origin": dict(origin or {}),
    }
    record["crc"] = _crc(record)
    for name, write in (
        (WEIGHTS_FILE, lambda path: write_weights(kept, path)),
        (CONFIG_FILE, lambda path: path.write_text(json.dumps(record, indent=2) + "\n")),
    ):
        with replacing(folder / name) as partial:
            write(partial)


def load_drafter(
    source: Path | str,
    head: TargetHead,
    spec: TargetSpec,
    overrides: Mapping[str, Any] | None = None,
    *,
    teaching: Teaching | None = None,
) -> Drafter:
    """The drafter in the folder ``source`` (or the folder of that file), beside the target it was trained for.

    Args:
        source: the folder, or a file in it.
        head: of the target.
        spec: of the target.
        overrides: changes of the config, nested as it is, such as ``{"retrieval": {"rho": 0.6}}``. Those that change
            the weights' names or shapes, or the layers of the target that it reads, are refused.
        teaching: what the drafter must have learned from; fields that are empty, here or in the checkpoint, are not
            compared. Another processor only brings a warning: pictures of another size may be what is measured.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it belongs to another target or reads other layers, or its weights do not fit its config.
    """
    folder, record = _open(source)
    _refuse_other_target(folder, _target_of(folder, record), spec)
    _refuse_other_teaching(folder, _teaching(folder, record), teaching or Teaching())
    with _readable(folder):
        kind = drafter_type(record["drafter"])
        config = from_plain(kind.config_type, record["config"])  # else the user's overrides would be blamed
        drafter = None if overrides else kind(spec, config, head)
    if drafter is None:
        settings = merged(record["config"], overrides or {}, prefix="drafter")
        drafter = kind(spec, from_plain(kind.config_type, settings), head)
    _refuse_other_layers(folder, record, drafter)
    _load_weights(drafter, folder / WEIGHTS_FILE)
    return drafter.eval()


def require_drafter(source: Path | str, name: str) -> None:
    """Refuses a ``source`` that is not a checkpoint of the drafter called ``name``, without its target at hand.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is another drafter's.
    """
    folder, record = _open(source)
    if record["drafter"] != name:
        raise CheckpointError(
            f"the drafter in {folder} is a {record['drafter']!r} and not a {name!r}; choose "
            f"drafter={record['drafter']}, or another checkpoint"
        )


def adopt_weights(drafter: Drafter, source: Path | str, target_fingerprint: str = "") -> None:
    """Gives ``drafter`` the weights of the one in ``source``; settings that leave their shapes alone may differ.

    Args:
        drafter: of the same kind, beside the same target.
        source: the folder, or a file in it.
        target_fingerprint: of the target's weights; an empty one, here or in the checkpoint, is not compared.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is another drafter's, belongs to another target or reads other layers of it, or its weights
            do not fit.
    """
    require_drafter(source, drafter.name)
    folder, record = _open(source)
    _refuse_other_target(folder, _target_of(folder, record), drafter.spec)
    _refuse_other_teaching(folder, _teaching(folder, record), Teaching(target_fingerprint=target_fingerprint))
    _refuse_other_layers(folder, record, drafter)
    _load_weights(drafter, folder / WEIGHTS_FILE)


def teaching_of(source: Path | str) -> Teaching:
    """What the drafter at ``source`` learned from.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: its config cannot be read.
    """
    return _teaching(*_open(source))


def _teaching(folder: Path, record: Mapping[str, Any]) -> Teaching:
    with _readable(folder):
        teaching = record["teaching"]
        processor = teaching.get("processor", {})
        return Teaching(tuple(teaching["mid_layers"]), teaching["target_fingerprint"], dict(processor))


def _target_of(folder: Path, record: Mapping[str, Any]) -> TargetSpec:
    with _readable(folder):
        return from_plain(TargetSpec, record["target"])


def _open(source: Path | str) -> tuple[Path, dict[str, Any]]:
    """Folder and record of the checkpoint at ``source``.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: its config cannot be read.
    """
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no drafter checkpoint at {source}: {folder / name} is missing")
    record = read_record(folder)
    return folder, record


def read_record(folder: Path) -> dict[str, Any]:
    """What the config in ``folder`` says, compared with its CRC-32; older ones have none.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read.
    """
    with _readable(folder):
        record = json.loads((folder / CONFIG_FILE).read_bytes())
        crc = record.pop("crc", None)
        if crc is not None and crc != (found := _crc(record)):
            raise ValueError(f"its CRC-32 is {found}, and it says {crc} (to change it by hand, take its crc out)")
        if not isinstance(record["drafter"], str) or not isinstance(record.get("config", {}), dict):
            raise TypeError("it names no drafter, or its settings have no names")
    return record


def _crc(record: Mapping[str, Any]) -> int:
    """CRC-32 of a record's content, however it is laid out."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Says in words that the config in ``folder`` cannot be used, whatever reading it runs into.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, AssertionError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{folder / CONFIG_FILE} is damaged or no drafter's: {what}; copy the drafter again, or export it anew by "
            "resuming its run"
        ) from error


def _load_weights(drafter: Drafter, path: Path) -> None:
    stored, wanted = read_weights(path), drafter.state_dict()
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {tuple(stored[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & stored.keys())
            if stored[name].shape != wanted[name].shape
        ],
    }
    found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
    if found:
        raise CheckpointError(
            f"{path} does not fit its config or the settings given. Weights {found}. Leave out the drafter.* settings "
            "that were typed, copy the drafter again, or train one with these settings"
        )
    drafter.load_state_dict(stored)


def _refuse_other_target(folder: Path, trained: TargetSpec, given: TargetSpec) -> None:
    differences = [
        f"{item.name} {getattr(trained, item.name)!r} is {getattr(given, item.name)!r} in this one"
        for item in fields(TargetSpec)
        if getattr(trained, item.name) != getattr(given, item.name)
    ]
    if differences:
        raise CheckpointError(
            f"the drafter in {folder} was trained for another target: {'; '.join(differences)}. Name its own target, a "
            f"{trained.architecture}, with model.path=<folder>, or {_TRAIN_ANEW}"
        )


def _refuse_other_teaching(folder: Path, trained: Teaching, wanted: Teaching) -> None:
    layers = list(trained.mid_layers)
    for name, remedy in (
        ("mid_layers", f"set model.mid_layers={layers}"),
        ("target_fingerprint", "name the weights that it was trained beside with model.path=<folder>"),
    ):
        have, want = getattr(trained, name), getattr(wanted, name)
        if want and have and have != want:
            raise CheckpointError(
                f"the drafter in {folder} was taught with {name} {have!r}, not {want!r}; {remedy}, or {_TRAIN_ANEW}"
            )
    _warn_of_other_processor(folder, trained.processor, wanted.processor)


def _warn_of_other_processor(folder: Path, trained: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if not trained or not wanted:
        return
    differences = [
        f"{name} was {trained.get(name)!r} and is {wanted.get(name)!r}"
        for name in sorted(trained.keys() | wanted.keys())
        if trained.get(name) != wanted.get(name)
    ]
    if differences:
        logger.warning(
            "the drafter in %s learned from another processor of the target: %s. Answers stay exact, acceptance may "
            "suffer",
            folder,
            "; ".join(differences),
        )


def _refuse_other_layers(folder: Path, record: Mapping[str, Any], drafter: Drafter) -> None:
    """Weights fit whatever layers they are given: other ones would pass for a drafter that is merely bad."""
    if "feature_layers" in record:
        with _readable(folder):
            trained = tuple(record["feature_layers"])
    else:  # checkpoints of older versions
        with _readable(folder):
            trained = from_plain(type(drafter.config), record["config"]).layers_read(drafter.spec)
    if trained != drafter.feature_layers:
        raise CheckpointError(
            f"the drafter in {folder} was trained on the outputs of layers {list(trained)} of its target and would "
            f"read those of {list(drafter.feature_layers)}; set drafter.feature_layers={list(trained)} or train anew"
        )
