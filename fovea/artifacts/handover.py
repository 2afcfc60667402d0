"""Lessons on their way to another process, as a stream of bytes; no pickle.

A message is the length of its head, 4 bytes, the head as JSON, and the bytes of the tensors that it lists. The length 0
ends the stream.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import IO, Any

import torch
from torch import Tensor

from fovea.artifacts.lesson import Lesson
from fovea.targets.teacher_batch import TeacherSample

_LENGTH = struct.Struct("<I")


def send(stream: IO[bytes], lesson: Lesson) -> None:
    """Writes ``lesson``; tensors of a device are copied from there, those of the host are not."""
    sample = lesson.sample
    tensors = {item.name: value for item in fields(sample) if isinstance(value := getattr(sample, item.name), Tensor)}
    tensors |= {f"picture.{number}": picture for number, picture in enumerate(sample.pictures or ())}
    contents = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in lesson.images)
    tensors |= {f"image.{number}": content for number, content in enumerate(contents)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {
        "key": sample.key,
        "grids": sample.grids,
        "feature_layers": sample.feature_layers,
        "pictures": None if sample.pictures is None else len(sample.pictures),
        "images": len(lesson.images),
        "source": lesson.source,
        "image_sizes": lesson.image_sizes,
        "tensors": [(name, str(tensor.dtype)[6:], list(tensor.shape)) for name, tensor in tensors.items()],
    }
    send_head(stream, about)
    for tensor in tensors.values():
        stream.write(_bytes_of(tensor))
    stream.flush()


def receive(stream: IO[bytes]) -> Lesson | None:
    """The next lesson; None behind the last one, and where the stream breaks off."""
    about = receive_head(stream)
    if about is None:
        return None
    tensors = {}
    for name, dtype, shape in about["tensors"]:
        tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if stream.readinto(_bytes_of(tensor)) < tensor.nbytes:  # type: ignore[attr-defined]
            return None
    images = tuple(tensors.pop(f"image.{number}").numpy().tobytes() for number in range(about["images"]))
    shown = about["pictures"]
    sample = TeacherSample(
        key=about["key"],
        grids=_pairs(about["grids"]),
        feature_layers=tuple(about["feature_layers"]),
        pictures=None if shown is None else tuple(tensors.pop(f"picture.{number}") for number in range(shown)),
        **tensors,
    )
    return Lesson(sample, about["source"], _pairs(about["image_sizes"]), images)


def send_head(stream: IO[bytes], about: dict[str, Any]) -> None:
    """Writes a message without tensors, or the beginning of one."""
    head = json.dumps(about).encode()
    stream.write(_LENGTH.pack(len(head)) + head)


def receive_head(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next head; None behind the last one, and where the stream breaks off."""
    prefix = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
    head = stream.read(length)
    return json.loads(head) if length and len(head) == length else None


def send_end(stream: IO[bytes]) -> None:
    """Ends the stream."""
    stream.write(_LENGTH.pack(0))
    stream.flush()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous ``tensor``."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _pairs(values: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in values)
