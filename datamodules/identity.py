"""Which samples a set has, in which order: what an epoch that was left within can only be gone on with."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from datamodules.conversation_source import ConversationSource
from fovea.artifacts.reading import IndexedArtifacts
from fovea.artifacts.streaming import StreamedArtifacts


def sample_keys(data: Any) -> list[str]:
    """Keys of conversations or artifacts, or of parts of them, in their order; those of a stream unshuffled."""
    if isinstance(data, Subset):
        keys = sample_keys(data.dataset)
        return [keys[number] for number in data.indices]
    if isinstance(data, ConcatDataset):
        return [key for part in data.datasets for key in sample_keys(part)]
    if isinstance(data, ConversationSource):
        return [conversation.key for conversation in data]
    if isinstance(data, IndexedArtifacts):
        return [entry.key for entry in data.entries]
    if isinstance(data, StreamedArtifacts):
        return [entry.key for entry in data.manifest.samples()]
    raise TypeError(f"the samples of a {type(data).__name__} have no known keys")


def samples_digest(data: Any) -> str:
    """16 hex digits over the keys and their order."""
    found = hashlib.sha256()
    for key in sample_keys(data):
        found.update(f"{key}\0".encode())
    return found.hexdigest()[:16]


def in_order_of_keys(source: ConversationSource) -> Subset[Any]:
    """The conversations in the order in which local artifacts of them are read."""
    keys = sample_keys(source)
    return Subset(source, sorted(range(len(keys)), key=keys.__getitem__))  # pyright: ignore[reportArgumentType]
