"""A teacher sample as the two members of a webdataset sample: ``meta.json`` and ``safetensors``; no pickle.

Legend: ``T`` tokens, ``A`` rotary axes, ``N`` visual tokens, ``R`` supervised positions, ``D`` hidden width.

Tensors of the safetensors member: ``ids`` [T] and ``positions`` [A, T] int32, ``answer_mask`` and ``is_visual`` [T]
bool, and the states ``last`` [T, D], ``mid`` [R, D], ``visual`` [N, D] in the dtype of the export. For fp8 (e4m3) each
row of a state is divided by its largest magnitude over 448, kept as ``<state>.scale`` [rows, 1] float32. Outputs of
feature layers are states ``feature.<layer>`` [T, D], one for each layer that was asked for. In the place of ``visual``
there may be encoded pictures, ``picture.0``, ``picture.1``, ... [bytes] uint8, of which the target's vision tower makes
it again (see :mod:`fovea.targets.vision`). Artifacts of older versions have no ``importance`` [N] float32 of the visual
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from fovea.artifacts.errors import ArtifactError
from fovea.targets.teacher_batch import TeacherSample, supervised_positions

StoredDtype = Literal["bf16", "fp32", "fp8"]
STORED_DTYPES: tuple[str, ...] = get_args(StoredDtype)
StoredVisual = Literal["stored", "recomputed"]
STORED_VISUALS: tuple[str, ...] = get_args(StoredVisual)
META, TENSORS = "meta.json", "safetensors"

_STATES = ("last", "mid", "visual")
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
#: Names of the safetensors format for the dtypes above.
_FORMAT_DTYPES = {
    "I32": torch.int32,
    "BOOL": torch.bool,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class SampleMeta:
    """What is known of a sample beside its tensors.

    Attributes:
        source: family or benchmark of the conversation.
        image_sizes: per image, (width, height) in pixels as given.
        image_hashes: per image, a hash of its content; equal pictures have equal hashes.
    """

    source: str = ""
    image_sizes: tuple[tuple[int, int], ...] = ()
    image_hashes: tuple[str, ...] = ()


def check_sample(sample: TeacherSample) -> None:
    """Refuses a sample whose tensors do not speak of the same tokens.

    Raises:
        ArtifactError: naming the key, the lengths that disagree, and masks that are none.
    """
    shapes = {"ids": 1, "positions": 2, "answer_mask": 1, "is_visual": 1, "last": 2, "mid": 2, "visual": 2}
    flat = [name for name, axes in shapes.items() if getattr(sample, name).ndim != axes]
    widths = {getattr(sample, name).shape[-1] for name in _STATES if name not in flat}
    if flat or len(widths) > 1:
        wrong = f"{', '.join(flat)} of a wrong number of axes" if flat else f"states of widths {sorted(widths)}"
        raise ArtifactError(f"sample '{sample.key}' does not fit together: {wrong}")
    tokens = sample.ids.shape[0]
    lengths = {
        "positions": (sample.positions.shape[-1], tokens),
        "answer_mask": (sample.answer_mask.shape[0], tokens),
        "is_visual": (sample.is_visual.shape[0], tokens),
        "last": (sample.last.shape[0], tokens),
        "mid": (sample.mid.shape[0], int(supervised_positions(sample.answer_mask).sum())),
        "visual": (sample.visual.shape[0], int(sample.is_visual.sum())),
    }
    if sample.importance is not None:
        lengths["importance"] = (sample.importance.shape[0], sample.visual.shape[0])
    if sample.features is not None:
        lengths["features"] = (sample.features.shape[0], tokens)
    wrong = [f"{name} has {found} rows instead of {want}" for name, (found, want) in lengths.items() if found != want]
    # Numbers in the place of a mask would be taken for places.
    masks = {"answer_mask": sample.answer_mask.dtype, "is_visual": sample.is_visual.dtype}
    wrong += [f"{name} is {str(dtype)[6:]} instead of bool" for name, dtype in masks.items() if dtype != torch.bool]
    wrong += [f"{name} are no numbers" for name in _STATES if not getattr(sample, name).is_floating_point()]
    if wrong:
        raise ArtifactError(f"sample '{sample.key}' of {tokens} tokens does not fit together: {', '.join(wrong)}")


def encode_sample(sample: TeacherSample, meta: SampleMeta, dtype: StoredDtype) -> dict[str, bytes]:
    """The members of ``sample`` by extension, states stored as ``dtype``; its pictures, if it has them, for ``visual``.

    Raises:
        ArtifactError: for tensors of unequal length or states with non-finite values, naming the key.
    """
    check_sample(sample)
    tensors = {
        "ids": sample.ids.to("cpu", torch.int32),
        "positions": sample.positions.to("cpu", torch.int32),
        "answer_mask": sample.answer_mask.cpu(),
        "is_visual": sample.is_visual.cpu(),
    }
    if sample.importance is not None:
        tensors["importance"] = sample.importance.to("cpu", torch.float32)
    states = {name: getattr(sample, name) for name in _STATES}
    if sample.pictures is not None:
        del states["visual"]
        tensors |= {f"picture.{number}": picture for number, picture in enumerate(sample.pictures)}
    if sample.features is not None:
        outputs = sample.features.chunk(len(sample.feature_layers), dim=-1)
        states |= {f"feature.{layer}": output for layer, output in zip(sample.feature_layers, outputs, strict=True)}
    for name, rows in states.items():
        tensors |= _store_states(rows.cpu(), name, sample.key, dtype)
    # Cloned: older safetensors refuse views that share a storage, as the states of one forward pass may.
    data = save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
    about = {
        "key": sample.key,
        "source": meta.source,
        "grids": sample.grids,
        "image_sizes": meta.image_sizes,
        "image_hashes": meta.image_hashes,
    }
    if sample.pictures is not None:
        about["pictures"] = len(sample.pictures)
    return {META: json.dumps(about).encode(), TENSORS: data}


def _store_states(states: Tensor, name: str, key: str, dtype: StoredDtype) -> dict[str, Tensor]:
    if dtype == "fp8":
        scale = states.float().abs().amax(dim=-1, keepdim=True) / _FP8_MAX
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        stored = (states.float() / scale).to(torch.float8_e4m3fn)
        result, finite = {name: stored, f"{name}.scale": scale}, torch.isfinite(scale)
    else:
        stored = states.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        result, finite = {name: stored}, torch.isfinite(stored)
    if not finite.all():
        row = int((~finite).any(dim=-1).nonzero()[0])
        raise ArtifactError(
            f"sample '{key}': the target's '{name}' states hold non-finite values as {dtype}, first in row {row}; "
            "a target that overflows in float16 must be loaded in bfloat16 or float32"
        )
    return result


def decode_sample(meta: bytes, data: Tensor, feature_layers: Sequence[int] = ()) -> tuple[TeacherSample, SampleMeta]:
    """The sample of a ``meta.json`` and a ``safetensors`` member; bf16 and fp32 states are views of ``data``.

    Args:
        meta: bytes of ``meta.json``.
        data: [bytes] uint8, the safetensors member; on a multiple of 8 bytes in its storage, as tar members are.
        feature_layers: layers whose outputs are wanted, side by side; they are a copy.

    Raises:
        ArtifactError: if the bytes are no sample, or its tensors do not fit together.
    """
    try:
        return _decode(meta, data, feature_layers)
    except ArtifactError:
        raise
    except Exception as error:  # whatever bytes that are no sample do to the readers of JSON and tensors
        raise ArtifactError(
            f"holds no sample ({error}); the shard is damaged or not the one in the manifest"
        ) from error


def _decode(meta: bytes, data: Tensor, feature_layers: Sequence[int]) -> tuple[TeacherSample, SampleMeta]:
    about = json.loads(meta)
    key = about["key"]
    tensors = _parse_safetensors(data, key)
    shown = about.get("pictures")
    try:
        sample = TeacherSample(
            key=key,
            ids=tensors["ids"].long(),
            positions=tensors["positions"].long(),
            answer_mask=tensors["answer_mask"],
            is_visual=tensors["is_visual"],
            last=_load_states(tensors, "last"),
            mid=_load_states(tensors, "mid"),
            visual=_load_states(tensors, "visual") if shown is None else _no_numbers(tensors),
            grids=_pairs(about["grids"]),
            importance=tensors.get("importance"),
            features=_join_features(tensors, feature_layers),
            feature_layers=tuple(feature_layers),
            pictures=None if shown is None else tuple(tensors[f"picture.{number}"] for number in range(shown)),
        )
    except KeyError as error:
        raise ArtifactError(
            f"sample '{key}' holds no tensor {error}; its shard was not written by this export"
        ) from None
    check_sample(sample)
    return sample, SampleMeta(about["source"], _pairs(about["image_sizes"]), tuple(about["image_hashes"]))


def _pairs(values: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in values)


def _join_features(tensors: Mapping[str, Tensor], layers: Sequence[int]) -> Tensor | None:
    return torch.cat([_load_states(tensors, f"feature.{layer}") for layer in layers], dim=-1) if layers else None


def _no_numbers(tensors: Mapping[str, Tensor]) -> Tensor:
    """[N, D] in the place of visual tokens that are to be computed: whoever forgot to is told by every loss."""
    dtype = torch.float32 if tensors["last"].dtype == torch.float32 else torch.bfloat16
    rows, width = int(tensors["is_visual"].sum()), tensors["last"].shape[1]
    return torch.full((1, 1), torch.nan, dtype=dtype).expand(rows, width)


def _load_states(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    stored = tensors[name]
    if stored.dtype != torch.float8_e4m3fn:
        return stored
    return (stored.float() * tensors[f"{name}.scale"]).bfloat16()


def _parse_safetensors(data: Tensor, key: str) -> dict[str, Tensor]:
    """Views of ``data`` by name: 8 bytes header length (little endian), header as JSON, then the tensors."""
    damaged = ArtifactError(f"sample '{key}' is damaged: its {data.shape[0]} bytes are not whole safetensors data")
    if data.shape[0] < 8:
        raise damaged
    start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    try:
        header = json.loads(data[8:start].numpy().tobytes())
        tensors = {}
        for name, entry in header.items():
            dtype, (begin, end) = _FORMAT_DTYPES[entry["dtype"]], entry["data_offsets"]
            misplaced = begin < 0 or start + end > data.shape[0]
            if misplaced or math.prod(entry["shape"]) * dtype.itemsize != end - begin:
                raise damaged
            tensors[name] = data[start + begin : start + end].view(dtype).view(entry["shape"])
    except ArtifactError:
        raise
    except Exception:  # whatever a damaged header does to the readers of JSON and of views
        raise damaged from None
    return tensors
