"""The errors that jobs may report, under their historic module."""

from smddp._native import core as _core

Error = _core().Error
CollectiveTimeoutError = _core().CollectiveTimeoutError
MismatchError = _core().MismatchError
PeerLostError = _core().PeerLostError
ClosedError = _core().ClosedError
TopologyError = _core().TopologyError
ConfigError = _core().ConfigError

__all__ = [
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigError",
    "Error",
    "MismatchError",
    "PeerLostError",
    "TopologyError",
]
