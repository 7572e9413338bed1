"""Groups of ranks without torch: `smddp.init()` and `smddp.Communicator`.

with smddp.init() as comm:  # on each rank that mpirun, torchrun or srun started
    total = comm.all_reduce(numpy.ones(1000, "float32"))
"""

from __future__ import annotations

import operator
import os
import pickle
import weakref
from array import array
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

from smddp._native import core
from smddp.arrays.composite import one_call
from smddp.exit_hooks.at_exit import shut_down_at_exit
from smddp.launch.environment import launched
from smddp.observability import stacks
from smddp.observability.info import COLLECTIVES, say_paths

if TYPE_CHECKING:
    from smddp._core import Arrays, Comm
else:
    Arrays = core().Arrays

#: Methods that the rendezvous needs of a store.
_STORE = ("set", "get", "check", "delete_key")

#: Exclusive upper bound of the core's integers.
_NUMBERS = 2**63

# torch's default timeout of a group, in seconds.
DEFAULT_TIMEOUT = 1800.0

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_made = 0


class Communicator(Arrays):
    """A group of ranks with collectives and point-to-point messages on contiguous arrays: numpy's, or any object with
    the buffer protocol or DLPack, on the host or on a CUDA device.

    `smddp.init`, `from_env` and `split` create it. Any thread may call; all ranks make the same collectives in the
    same order. Counts are elements, times are seconds. `smddp._core.Arrays` documents the calls (`all_reduce`,
    `all_gather`, `send`, ...). They raise ValueError and TypeError for invalid arguments before any data is sent, and
    `smddp.CollectiveTimeoutError`, `MismatchError`, `PeerLostError`, `CorruptionError` and `ClosedError` with the
    affected ranks in `error.ranks`.

    Attributes:
        rank: Rank of this process in the group.
        size: Number of ranks.
        name: Name of the group.
        local_rank: Index of this rank among the group's ranks on its host, or the launcher's value.
        local_size: Number of the group's ranks on this host, or the launcher's value.
    """

    communicator: Comm
    rank: int
    size: int
    name: str
    local_rank: int
    local_size: int

    @classmethod
    def from_env(cls, timeout: float | timedelta = DEFAULT_TIMEOUT) -> Communicator:
        """Returns the group of all ranks that the launcher started, as `smddp.init()` without arguments.

        Args:
            timeout: Seconds or a timedelta, as of `smddp.init`.
        """
        return init(timeout=timeout)

    @classmethod
    def over(cls, comm: Comm, local: tuple[int | None, int | None] = (None, None)) -> Communicator:
        """Wraps a communicator of the core.

        local: this rank's number on its host and the number of ranks there, counted where the launcher sets neither.
        """
        made = cls.__new__(cls, comm)
        nodes = comm.nodes()
        local_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
        local_rank, local_size = local
        made.communicator = comm
        made.rank, made.size, made.name = comm.rank, comm.size, comm.name
        made.local_rank = local_ranks.index(comm.rank) if local_rank is None else local_rank
        made.local_size = local_size or len(local_ranks)
        _open.add(made)
        stacks.offer()
        shut_down_at_exit()
        say_paths(comm)
        weakref.finalize(made, _close, comm, os.getpid()).atexit = False
        return made

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Returns the group of all ranks with the same color. Collective over this group, as `MPI_Comm_split`.

        Args:
            color: Ranks with equal colors form a group. None: no group for this rank.
            key: Order of the ranks in the new group; ranks with equal keys keep their order.

        Returns:
            The new group; None if `color` is None.

        Raises:
            TopologyError: A rank cannot create the group. All ranks of the new group raise it.
        """
        made = self.communicator.split(color, key)
        return None if made is None else type(self).over(made)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Returns rank `root`'s value on every rank. Values are pickled; use it with trusted peers only.

        Args:
            value: Object to send, on rank `root`. Other ranks may omit it.
            root: Rank of the value.
        """
        data = pickle.dumps(value) if self.rank == root else b""
        length = array("q", [len(data)])
        with one_call(self.communicator, "broadcast_object"):
            self.broadcast(length, root)
            buffer = bytearray(data or length[0])
            self.broadcast(buffer, root)
        return value if self.rank == root else pickle.loads(buffer)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns all ranks' values in rank order. Values are pickled; use it with trusted peers only.

        Args:
            value: Object of this rank.
        """
        data = pickle.dumps(value)
        lengths = array("q", [0] * self.size)
        with one_call(self.communicator, "all_gather_object"):
            self.all_gather(array("q", [len(data)]), out=lengths)
            buffer = bytearray(sum(lengths))
            self.all_gather(data, out=buffer, counts=list(lengths))
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        return [pickle.loads(buffer[start : start + length]) for start, length in zip(starts, lengths)]

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Sets the default deadline of later calls.

        Args:
            timeout: Seconds or a timedelta, more than zero.

        Raises:
            ValueError: `timeout` is not positive.
        """
        self.communicator.set_timeout(_deadline(timeout))

    def path(self, collective: str, nbytes: int) -> str:
        """Returns the transport and algorithm of a collective, such as "shm mesh".

        Args:
            collective: Name of the collective, such as "all_reduce".
            nbytes: Size of the whole buffer in bytes, 0 to 2**63 - 1.

        Raises:
            ValueError: The collective is unknown, or the size is out of range.
        """
        if collective not in COLLECTIVES:
            raise ValueError(f"path: unknown collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
        if not 0 <= nbytes < _NUMBERS:
            raise ValueError(f"path: nbytes {nbytes} is out of range: expected 0 to 2**63 - 1")
        return self.communicator.path(COLLECTIVES.index(collective), 0, nbytes)

    @property
    def way(self) -> str:
        """Transports of the group: "shm", "tcp eth0 10.0.0.1", or both."""
        return self.communicator.transports()

    @property
    def error(self) -> BaseException | None:
        """Reason why the group is unusable; None while it is usable."""
        return self.communicator.error()

    def close(self) -> None:
        """Leaves the group together with the other ranks after all calls have completed. Idempotent.

        Raises:
            MismatchError: Ranks made different calls, and no call has reported it.
        """
        if self in _open:
            _open.discard(self)
            try:
                self.communicator.finish(core().Comm.leave_seconds())
            finally:
                self.communicator.close()

    def abort(self, reason: str = "") -> None:
        """Raises ClosedError in all waiting calls of all ranks. Does not wait for them.

        Args:
            reason: Text of the errors. Default: this rank aborted the group.
        """
        _open.discard(self)
        self.communicator.abort(reason or f"rank {self.rank} aborted the group")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # Let that error propagate; the other ranks are notified that this rank left.
            _open.discard(self)
            self.communicator.close_in_background()

    def __repr__(self) -> str:
        return f"<smddp.Communicator {self.name!r}: rank {self.rank} of {self.size}, {self.way}>"

    def __reduce__(self) -> Any:
        raise TypeError("a smddp.Communicator belongs to its process and cannot be pickled")


def init(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    port: int | None = None,
    store: Any = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> Communicator:
    """Forms a group with all other ranks. Each further call creates another group of the same ranks.

    Without arguments, rank and address come from the environment of torchrun, Open MPI, MVAPICH2, MPICH, Intel MPI, HPE
    PALS, Flux, jsrun, srun or smddprun. A process without a launcher is the only rank of its group.

    Args:
        rank: Rank of this process. Default: the launcher's environment.
        size: Number of ranks. Required if `rank` is given.
        address: Address of rank 0 as "host:port" ("[::1]:29500" for IPv6), or its host alone with `port`.
        port: Port of rank 0. Default: MASTER_PORT, or a port derived from the job.
        store: One of torch's stores, or any object with `set(key, bytes)`, `check([keys])`, `get(key)` and
            `delete_key(key)` that all ranks share; in place of an address.
        timeout: Seconds or a timedelta, to form the group, and the default deadline of the group's calls. No deadline:
            `float("inf")`.

    Returns:
        A communicator over all ranks.

    Raises:
        ConfigError: The environment is invalid, has no address of rank 0, or is that of a Slurm batch script without
            srun.
        ValueError: An argument is invalid.
        CollectiveTimeoutError: Ranks did not join within `timeout`; `ranks` lists them.
        TopologyError: Rank 0 does not listen, or ranks cannot reach each other.

    Example:
        >>> with smddp.init() as comm:
        ...     total = comm.all_reduce(numpy.ones(3))
    """
    global _made
    seconds = _deadline(timeout)
    if store is not None and (address is not None or port is not None):
        raise ValueError(f"smddp.init: expected a store or an address, not both ({address=}, {port=})")
    if store is not None and not all(callable(getattr(store, name, None)) for name in _STORE):
        kind = type(store).__name__
        raise TypeError(f"smddp.init: store must have {', '.join(_STORE)}, as torch's stores do; {kind} has not")
    given = (rank is not None, size is not None)
    if given == (False, False) and store is None and address is None:
        rank, size, local_rank, local_size, meet = launched(port) or (0, 1, 0, 1, None)
        local: tuple[int | None, int | None] = (local_rank, local_size)
    elif given != (True, True):
        raise ValueError(f"smddp.init: rank and size go together, with address or store (rank {rank}, size {size})")
    else:
        local, meet = (None, None), None
        if store is None and (size != 1 or address is not None):
            meet = _meeting_point(address, port)
    assert rank is not None and size is not None
    rank, size = _integer("rank", rank), _integer("size", size)
    if not 0 <= rank < size:
        raise ValueError(f"smddp.init: rank {rank} is not in a group of {size}")
    name = f"world {_made + 1}" if _made else "world"
    native = core()
    if store is not None:
        comm = native.Comm.make(store, "init", name, rank, size, seconds)
        comm.set_timeout(seconds)
    else:
        comm = native.Comm.join("init", name, rank, size, meet, seconds, local[1])
    _made += 1
    return Communicator.over(comm, local)


def open_groups() -> list[Communicator]:
    """Returns the open groups of this process, sorted by name."""
    return sorted(_open, key=lambda group: group.name)


def _close(comm: Comm, owner: int) -> None:
    if os.getpid() == owner:
        comm.close_in_background()


def _meeting_point(address: str | None, port: int | None) -> tuple[str, int, bool]:
    host, written = _split(address or "")
    if written and port is not None:
        raise ValueError(f"smddp.init: address {address!r} has a port, and port {port} is given as well")
    number = written or (str(port) if port is not None else "")
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise ValueError(
            'smddp.init: address must be "host:port" of rank 0 ("10.0.0.5:29500", "[::1]:29500"), '
            f"or its host with port=, not {address!r}" + (f" with port {port}" if port is not None else "")
        )
    return host, int(number), host in ("localhost", "::1") or host.startswith("127.")


def _split(address: str) -> tuple[str, str]:
    """Host and port of "host", "host:port", "[IPv6]" or "[IPv6]:port"; a bare IPv6 address has no port."""
    if address.startswith("["):
        host, closed, rest = address[1:].partition("]")
        return (host, rest[1:]) if closed and (not rest or (rest[0] == ":" and rest[1:])) else ("", "")
    host, _, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "")
    return host, port


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"smddp.init: {name} must be an integer, not {type(value).__name__} ({value!r})") from None
    if abs(number) >= _NUMBERS:
        raise ValueError(f"smddp.init: {name} {number} is out of range: expected less than 2**63")
    return number


def _deadline(timeout: float | timedelta) -> float:
    """Returns a deadline in seconds. Raises ValueError if it is not positive, TypeError for another type."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        kind = type(timeout).__name__
        raise TypeError(f"timeout must be a number of seconds or a datetime.timedelta, not {kind} ({timeout!r})")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return min(timeout, 1e18)  # a larger int has no float
