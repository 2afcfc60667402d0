"""Notes every micro-batch of a training in a file, so that runs can be compared sample by sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L


class Watch(L.Callback):
    """Appends epoch, batch, rank, keys and loss (its bits, in hexadecimal) of each micro-batch to ``path``."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        place = [trainer.current_epoch, batch_idx, trainer.global_rank]
        line = [*place, list(batch.keys), float(outputs["loss"]).hex()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
