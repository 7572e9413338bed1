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

# Without the import of typing, which takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    from smddp.arrays.communicator import Communicator, init
    from smddp.arrays.symmetric import empty
    from smddp.formats import exact
    from smddp.torch.bound_calls import bind
    from smddp.torch.error_feedback.ddp import ErrorFeedback, error_feedback_hook
    from smddp.torch.error_feedback.fsdp import error_feedback_fsdp
    from smddp.torch.fsdp_overlap import overlap_fsdp
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
    "PeerLostError",
    "ClosedError",
    "TopologyError",
    "ConfigError",
    "__version__",
)

# What is in modules of its own, of which most need torch.
_FROM = {
    "Communicator": "arrays.communicator",
    "init": "arrays.communicator",
    "bind": "torch.bound_calls",
    "empty": "arrays.symmetric",
    "ErrorFeedback": "torch.error_feedback.ddp",
    "error_feedback_hook": "torch.error_feedback.ddp",
    "error_feedback_fsdp": "torch.error_feedback.fsdp",
    "exact": "formats",
    "overlap_fsdp": "torch.fsdp_overlap",
    "ReconfigureOptions": "torch.reconfigure",
}

__all__ = [
    "Communicator",
    "ErrorFeedback",
    "ReconfigureOptions",
    "bind",
    "dump",
    "empty",
    "error_feedback_fsdp",
    "error_feedback_hook",
    "exact",
    "info",
    "init",
    "log_to",
    "overlap_fsdp",
    "paths",
    "traffic",
    *_FROM_CORE,
]


def info() -> dict[str, Any]:
    """What was found on this machine, the settings in force, and the paths of all open groups.

    `smddp info` on the command line prints the same.
    """
    from smddp.observability.info import collect

    return collect()


def paths() -> dict[str, str]:
    """Which way the collectives of all open groups took so far: {"all_gather": "shm mesh x 120 (1.2 GiB)", ...}.

    Across nodes the way names the interface, too: "shm + tcp eth0 10.0.0.1 ring x 120 (1.2 GiB)".
    """
    from smddp.observability.info import taken

    return taken()


def traffic() -> list[dict[str, Any]]:
    """What the collectives and sends of all open groups moved so far: one entry per group, collective and algorithm.

    Each entry: group, size (ranks), nodes (that the group spans), way, collective, algorithm, operations, bytes (the
    sum of the operations' whole buffers), crossed (bytes that this rank itself sent to other nodes, as they travelled).
    Messages that this rank sent, "collective": "send", are counted by where they went: nodes is 1 for its own, 2 for
    another.
    """
    from smddp.observability.info import traffic as counted

    return counted()


def dump(path: str | None = None) -> dict[str, Any]:
    """What the recorder has: each open group's newest operations (SMDDP_RECORDER of them), their times and ends.

    path: a file that gets the same as JSON, for `smddp trace`. Times end in _ns, nanoseconds since 1970; a call that
    is not over has none for its end. Raises OSError where the file cannot be written; the old one is still there.
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
    """Makes lines of the log records of Python's `logging`, in this process, instead of lines on standard error.

    logger: a logger or its name. What is told is what that logger is enabled for when this is called (WARN is WARNING,
    INFO INFO, TRACE DEBUG), and whatever SMDDP_DEBUG asks for; each record has the time at which it was told.
    Raises TypeError for anything else.

        logging.basicConfig(level=logging.INFO)
        smddp.log_to()
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
    raise AttributeError(f"module 'smddp' has no attribute {name!r}")
