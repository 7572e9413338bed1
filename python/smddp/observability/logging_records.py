"""Conversion of log lines to records of Python's `logging`."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any

from smddp._native import core

#: Python's log level for each smddp level.
LEVELS = {"VERSION": logging.INFO, "WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": logging.DEBUG}

# The reader thread, and the id of its process.
_reader: tuple[threading.Thread, int] | None = None


def log_to(logger: logging.Logger | str = "smddp") -> None:
    """See smddp.log_to."""
    global _reader
    if isinstance(logger, str):
        logger = logging.getLogger(logger)
    if not isinstance(logger, logging.Logger):
        raise TypeError(f"log_to takes a logging.Logger or the name of one, not {logger!r}")
    if _reader is None:
        atexit.register(_drain)
    finest = "TRACE" if logger.isEnabledFor(logging.DEBUG) else "INFO" if logger.isEnabledFor(logging.INFO) else "WARN"
    # A separate thread: the core logs on any thread, and may hold locks that Python code needs.
    reader = threading.Thread(target=_read, args=(core().LogReader(finest), logger), name="smddp-log", daemon=True)
    reader.start()
    _reader = reader, os.getpid()


def _read(lines: Any, logger: logging.Logger) -> None:
    while (line := lines.next()) is not None:
        ours, time, text = line
        level = LEVELS[ours]
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger.name, level, "smddp", 0, text, (), None)
            record.created, record.msecs = time, time % 1 * 1000
            logger.handle(record)


def _drain() -> None:
    if _reader is not None and _reader[1] == os.getpid():
        core().LogReader.close()
        _reader[0].join(2)
