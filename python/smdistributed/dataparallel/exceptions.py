"""The errors that a job may report as its first cause, under their historic module.

The training toolkit looks for every name of a class here in what a job writes, and takes the first it finds for the
cause. So these are the errors that are one: not `Error`, which is in every other name, and neither `PeerLostError` nor
`ClosedError`, which the other ranks raise after one rank failed independently. All of them are in `smddp`.
"""

from smddp._native import core as _core

CollectiveTimeoutError = _core().CollectiveTimeoutError
MismatchError = _core().MismatchError
TopologyError = _core().TopologyError

__all__ = ["CollectiveTimeoutError", "MismatchError", "TopologyError"]


def __getattr__(name: str) -> type[Exception]:
    if name in ("ClosedError", "ConfigError", "Error", "PeerLostError"):
        found: type[Exception] = getattr(_core(), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
