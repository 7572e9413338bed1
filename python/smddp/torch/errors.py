"""The core's errors, dressed so that torch's handlers know them too.

Each class here is both the core's class (`smddp.PeerLostError`) and `torch.distributed.DistBackendError`,
so `except` clauses written for either see it.
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
    # The global ranks that the error is about: who is missing, who died, who called something else.
    ranks: list[int]


class Error(_Ranks, _core.Error, DistBackendError):
    """Anything that stopped a call after it began."""


class CollectiveTimeoutError(_Ranks, _core.CollectiveTimeoutError, DistBackendError):
    """A deadline passed; the message names the ranks that are missing."""


class MismatchError(_Ranks, _core.MismatchError, DistBackendError):
    """Ranks called different operations, or the same one with different sizes."""


class PeerLostError(_Ranks, _core.PeerLostError, DistBackendError):
    """A rank of the group died."""


class ClosedError(_Ranks, _core.ClosedError, DistBackendError):
    """The group was destroyed or aborted."""


class TopologyError(_Ranks, _core.TopologyError, DistBackendError):
    """Ranks of the group cannot reach each other."""


_DRESSED = {
    getattr(_core, cls.__name__): cls
    for cls in (Error, CollectiveTimeoutError, MismatchError, PeerLostError, ClosedError, TopologyError)
}


def translate(error: BaseException, ranks: Sequence[int] | None) -> BaseException:
    """`error` as one of the classes above; all that is not the core's comes back as it is.

    `ranks`: the global ranks of a group that does not hold all ranks in order, else None. The core counts
    inside the group, so a line is added that says who that is. The end names the doctor's line that shows the cause.
    """
    dressed = _DRESSED.get(type(error))
    if dressed is None:
        return error
    if dressed is PeerLostError:
        first_cause.record_peer_failure()
    if dressed in (CollectiveTimeoutError, MismatchError, PeerLostError):
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
    """ " (ranks of this group are ...)" where group ranks and global ranks differ, else ""."""
    if ranks is None:
        return ""
    shown = ", ".join(f"{group}={world}" for group, world in list(enumerate(ranks))[:16])
    more = ", ..." if len(ranks) > 16 else ""
    return f" (rank in this group = global rank: {shown}{more})"
