"""What a run says on the console, and what only its log file keeps."""

from __future__ import annotations

import copy
import logging
import sys
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


class LogFile(logging.FileHandler):
    """A log file whose disk may be full: the console still has what is said, and no traceback per line that is lost."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


#: How Lightning begins what it says of every run, and what the run's own output says better or need not say.
_SMALL_TALK = (
    "Seed set to",
    "`weights_only` was not set",
    "GPU available",
    "TPU available",
    "HPU available",
    "\N{ELECTRIC LIGHT BULB} Tip",
    "Loading `train_dataloader` to estimate",
    "`Trainer.fit` stopped",
    "Using bfloat16 Automatic Mixed Precision",
    "You are using a CUDA device",
    "LOCAL_RANK",
)
#: Loggers of Lightning's that say it: a filter holds for one logger and for none below it.
_SPEAKERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
)


def quiet_lightning() -> None:
    """Lets Lightning speak through the handlers of the job, once, and only of what is particular to a run."""
    logging.getLogger("lightning").handlers.clear()
    for name in _SPEAKERS:
        logging.getLogger(name).addFilter(_is_news)
    for message in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning beside a newer torch
        r"The '\w+_dataloader' does not have many workers",  # on purpose: they would take the cores of training
    ):
        warnings.filterwarnings("ignore", message=message)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_SMALL_TALK)
