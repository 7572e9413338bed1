"""The logger of `torch.sagemaker`: one for the package, each line with its rank.

SMP_LOG_LEVEL sets its level: off, fatal, error, warning, info (the default), debug.
"""

from __future__ import annotations

import logging
import os

NAME = "smddp.sagemaker"
OFF = logging.CRITICAL + 10
LEVELS = {
    "off": OFF,
    "fatal": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_FORMAT = "[%(asctime)s] [%(levelname)s] [rank %(rank)s] %(message)s"


def get_logger() -> logging.Logger:
    """Returns the package's logger.

    The first call sets its level from SMP_LOG_LEVEL, unless the script has set one, and gives it a handler to
    stderr, unless the script has configured logging itself; its formats may then use ``%(rank)s``.

    Raises ValueError for an unknown SMP_LOG_LEVEL.
    """
    logger = logging.getLogger(NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(_level())
    if _add_rank not in logger.filters:
        logger.addFilter(_add_rank)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger


def _level() -> int:
    given = os.environ.get("SMP_LOG_LEVEL", "info")
    if given.lower() not in LEVELS:
        raise ValueError(f"SMP_LOG_LEVEL is {given!r}; it is one of {', '.join(LEVELS)}")
    return LEVELS[given.lower()]


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank()
    return True


def _rank() -> str:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return os.environ.get("RANK", "-")
