"""Writes Lightning's checkpoints where they belong, without a copy elsewhere."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from fovea.files import room_for


class CheckpointFiles(TorchCheckpointIO):
    """A trainer's plugin for checkpoints on file systems.

    Lightning's own writes each checkpoint into the machine's temporary folder first, which is often small, and where
    what a killed process was writing stays for good.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes ``checkpoint`` to ``path``; whoever wants it in one piece gives a name beside and renames it.

        Raises:
            DiskFullError: there is no room for it.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()  # a full disk is told in words only by our own writing
        torch.save(checkpoint, content)
        with room_for(path), path.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
