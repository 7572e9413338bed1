"""smddp: collective communication for training, as a torch.distributed backend and as a library.

Importing this package needs neither torch nor the native core; both are loaded when first used.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("smddp")

or, without torch, on numpy arrays:

    >>> comm = smddp.init()
    >>> comm.all_reduce(array)
"""

from __future__ import annotations

from smddp import _alias
from smddp.exit_hooks import at_exit

# Avoids the import of typing, which is slow.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    from smddp.arrays.communicator import Communicator, init
    from smddp.arrays.symmetric import empty
    from smddp.formats import exact
    from smddp.torch.bound_calls import bind
    from smddp.torch.error_feedback.ddp import ErrorFeedback, error_feedback_hook
    from smddp.torch.reconfigure import ReconfigureOptions

# `import torch.sagemaker` works after `import smddp`, too, where torch's discovery of backends is off.
_alias.install()

# Before the exit hooks of the program, which then run earlier than this one and may use its groups.
at_exit.register()

# The errors and the version come from the native core; `__getattr__` fetches them on first use.
_FROM_CORE = (
    "Error",
    "CollectiveTimeoutError",
    "MismatchError",
    "DeadlockError",
    "PeerLostError",
    "CorruptionError",
    "ClosedError",
    "TopologyError",
    "ConfigError",
    "__version__",
)

# Names in separate modules, most of which need torch.
_FROM = {
    "Communicator": "arrays.communicator",
    "init": "arrays.communicator",
    "bind": "torch.bound_calls",
    "empty": "arrays.symmetric",
    "ErrorFeedback": "torch.error_feedback.ddp",
    "error_feedback_hook": "torch.error_feedback.ddp",
    "exact": "formats",
    "ReconfigureOptions": "torch.reconfigure",
}

__all__ = [
    "Communicator",
    "ErrorFeedback",
    "ReconfigureOptions",
    "bind",
    "dump",
    "empty",
    "error_feedback_hook",
    "exact",
    "info",
    "init",
    "log_to",
    "paths",
    "report",
    "traffic",
    *_FROM_CORE,
]


def info() -> dict[str, Any]:
    """Returns facts about this machine, the settings, and the paths of all open groups, as `smddp info` prints them."""
    from smddp.observability.info import collect

    return collect()


def paths() -> dict[str, str]:
    """Returns the paths used by the collectives of all open groups: {"all_gather": "shm mesh x 120 (1.2 GiB)", ...}.

    Across nodes the path includes the interface: "shm + tcp eth0 10.0.0.1 ring x 120 (1.2 GiB)".
    """
    from smddp.observability.info import taken

    return taken()


def traffic() -> list[dict[str, Any]]:
    """Returns the traffic of all open groups.

    Returns:
        One entry per group, collective and algorithm: group, size (ranks), nodes (spanned by the group), way (the
            path), collective, algorithm, operations, bytes (sum of the operations' whole buffers), crossed (bytes that
            this rank sent to other nodes, in wire format). Sent messages have "collective": "send", and nodes is 1 for
            the own node and 2 for another one.
    """
    from smddp.observability.info import traffic as counted

    return counted()


def report() -> str:
    """Returns one table of this process's open groups: calls, bytes, times, and the share of waiting for late ranks.

    Times are those of the newest operations (SMDDP_RECORDER of each group). The waiting share and the stragglers need
    the other ranks of this host, which the host's first process queries for at most 3 seconds each; other processes
    show "-". Call it before `destroy_process_group`, which closes the groups.

    Example:
        >>> print(smddp.report())
    """
    from smddp.observability.report import report as text

    return text()


def dump(path: str | None = None) -> dict[str, Any]:
    """Returns the recorder's content: each open group's newest operations (SMDDP_RECORDER of them) and their times.

    Keys with suffix _ns are nanoseconds since 1970. A running call has no end.

    Args:
        path: File for the same content as JSON, for `smddp trace`.

    Raises:
        OSError: The file cannot be written. An existing file is then unchanged.
    """
    import json

    from smddp._native import core

    text = core().dump()
    if path is not None:
        from smddp.files import write_text

        write_text(path, text)
    found: dict[str, Any] = json.loads(text)
    return found


def log_to(logger: logging.Logger | str = "smddp") -> None:
    """Sends log lines of this process to Python's `logging` instead of standard error.

    Each record has the time of the log line.

    Args:
        logger: A logger or its name. Its level at this call enables lines, in addition to SMDDP_DEBUG: WARN is
            WARNING, INFO is INFO, TRACE is DEBUG.

    Raises:
        TypeError: `logger` is of another type.

    Example:
        >>> logging.basicConfig(level=logging.INFO)
        >>> smddp.log_to()
    """
    from smddp.observability.logging_records import log_to

    log_to(logger)


def __getattr__(name: str) -> Any:
    if name in _FROM_CORE:
        from smddp._native import core

        value = globals()[name] = getattr(core(), name)
        return value
    if name in _FROM:
        import importlib

        value = globals()[name] = getattr(importlib.import_module(f"smddp.{_FROM[name]}"), name)
        return value
    if name in _alias.EXPERIMENTAL:
        value = globals()[name] = _alias.experimental(name)
        return value
    raise AttributeError(f"module 'smddp' has no attribute {name!r}")
