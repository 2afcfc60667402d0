"""What a run says on the console, and what only its log file keeps."""

from __future__ import annotations

import copy
import logging

#: Attribute of a log record whose traceback belongs into the log file only.
FILE_ONLY = "traceback_in_file_only"


class ConsoleFormatter(logging.Formatter):
    """Leaves the traceback of a user's error to the log file: on the console the sentence is enough."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, FILE_ONLY, False):
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        return super().format(record)
