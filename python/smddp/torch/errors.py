"""The core's errors as subclasses of torch's.

Each class derives from the core's class (such as `smddp.PeerLostError`) and `torch.distributed.DistBackendError`, so
`except` clauses for either one match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed import DistBackendError

from smddp._native import core
from smddp.exit_hooks import first_cause
from smddp.torch import flight_recorder
from smddp.torch.error_hints import hint

if TYPE_CHECKING:
    from smddp import _core
else:
    _core = core()
CoreError: type[RuntimeError] = _core.Error


class _Ranks:
    # Global ranks that caused the error: missing, dead or mismatched ranks.
    ranks: list[int]


class Error(_Ranks, _core.Error, DistBackendError):
    """Base of errors that end a started call."""


class CollectiveTimeoutError(_Ranks, _core.CollectiveTimeoutError, DistBackendError):
    """A deadline passed; the message names the ranks that are missing."""


class MismatchError(_Ranks, _core.MismatchError, DistBackendError):
    """Ranks called different operations, or the same one with different sizes."""


class DeadlockError(_Ranks, _core.DeadlockError, DistBackendError):
    """Ranks wait for each other in a cycle; the message names the call and the Python line of each."""


class PeerLostError(_Ranks, _core.PeerLostError, DistBackendError):
    """A rank of the group died."""


class CorruptionError(_Ranks, _core.CorruptionError, DistBackendError):
    """Data changed between two ranks, or the results of ranks differ (`SMDDP_AUDIT`)."""


class ClosedError(_Ranks, _core.ClosedError, DistBackendError):
    """The group was destroyed or aborted."""


class TopologyError(_Ranks, _core.TopologyError, DistBackendError):
    """Ranks of the group cannot reach each other."""


_DRESSED = {
    getattr(_core, cls.__name__): cls
    for cls in (
        Error,
        CollectiveTimeoutError,
        MismatchError,
        DeadlockError,
        PeerLostError,
        CorruptionError,
        ClosedError,
        TopologyError,
    )
}


def translate(error: BaseException, ranks: Sequence[int] | None) -> BaseException:
    """Converts a core error to one of the classes above; returns other errors unchanged.

    ranks: the global ranks of a group that does not hold all ranks in order, else None. The core reports ranks within
    the group, so the text gains their global ranks. It ends with a hint to the doctor's check that shows the cause.
    """
    dressed = _DRESSED.get(type(error))
    if dressed is None:
        return error
    if dressed is PeerLostError:
        first_cause.record_peer_failure()
    if dressed in (CollectiveTimeoutError, MismatchError, DeadlockError, PeerLostError, CorruptionError):
        flight_recorder.failed()
    made = dressed(f"{error}{rank_note(ranks)}{hint(str(error))}")
    about = getattr(error, "ranks", ())
    made.ranks = [ranks[rank] for rank in about] if ranks is not None else list(about)
    return made


@contextmanager
def translated(ranks: Sequence[int] | None) -> Iterator[None]:
    """Raises the core's errors of the block as the classes above, with their causes. ranks: as in `translate`."""
    try:
        yield
    except CoreError as error:
        raise translate(error, ranks) from error.__cause__


def rank_note(ranks: Sequence[int] | None) -> str:
    """Returns " (rank in this group = global rank: ...)" if these ranks differ, else ""."""
    if ranks is None:
        return ""
    shown = ", ".join(f"{group}={world}" for group, world in list(enumerate(ranks))[:16])
    more = ", ..." if len(ranks) > 16 else ""
    return f" (rank in this group = global rank: {shown}{more})"
