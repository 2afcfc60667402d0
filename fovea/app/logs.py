"""What a run says on the console, and what only its log file keeps."""

from __future__ import annotations

import copy
import logging
import warnings

#: Attribute of a log record whose traceback belongs into the log file only.
FILE_ONLY = "traceback_in_file_only"


class ConsoleFormatter(logging.Formatter):
    """Leaves the traceback of a user's error to the log file: on the console the sentence is enough."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, FILE_ONLY, False):
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        return super().format(record)


def quiet_lightning() -> None:
    """Lets Lightning speak through the handlers of the job, once, and only of what calls for attention."""
    logging.getLogger("lightning").handlers.clear()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning beside a newer torch
        r"You have overridden `transfer_batch_to_device` in `LightningModule`",  # on purpose: a batch is no tensor
        r"The 'train_dataloader' does not have many workers",  # on purpose: they would take the cores of training
        r"The 'val_dataloader' does not have many workers",
        r"Checkpoint directory .* exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=message)
