"""What is to be stored of a conversation, as any thread or process can be given it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from PIL import Image

from fovea.artifacts.schema import SampleMeta, StoredVisual
from fovea.artifacts.teaching import Taught
from fovea.targets.conversation import ImageSource
from fovea.targets.images import encoded_picture, image_bytes
from fovea.targets.teacher_batch import TeacherSample


@dataclass(frozen=True)
class Lesson:
    """A sample and what is told of it, the hashes of its images not yet computed.

    Attributes:
        sample: with pictures where these stand for its visual tokens.
        source: family or benchmark of the conversation.
        image_sizes: per image, (width, height) in pixels as given.
        images: per image, what :func:`hash_image` hashes.
    """

    sample: TeacherSample
    source: str
    image_sizes: tuple[tuple[int, int], ...]
    images: tuple[bytes, ...]

    @staticmethod
    def of(taught: Taught, visual: StoredVisual) -> Lesson:
        """That of a conversation, stored as ``visual`` says; reads its pictures.

        Raises:
            BrokenImageError: a picture that was there is gone.
        """
        conversation, encoded, sample = taught
        if visual == "recomputed":
            pictures = (bytearray(encoded_picture(image)) for image in conversation.images)
            sample = replace(sample, pictures=tuple(torch.frombuffer(p, dtype=torch.uint8) for p in pictures))
        return Lesson(sample, conversation.source, encoded.image_sizes, tuple(map(_content, conversation.images)))

    def meta(self) -> SampleMeta:
        """What the artifacts tell of the sample; hashes its images."""
        return SampleMeta(self.source, self.image_sizes, tuple(map(_hash, self.images)))


def hash_image(image: ImageSource) -> str:
    """16 hex digits over an encoded picture's bytes, or over mode, size and pixels of a picture in memory."""
    return _hash(_content(image))


def _content(image: ImageSource) -> bytes:
    if isinstance(image, Image.Image):
        return f"{image.mode}{image.size}".encode() + image.tobytes()
    return image_bytes(image)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
