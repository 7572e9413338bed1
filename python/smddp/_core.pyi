"""The native core: conversions only; the behaviour is documented where it lives, in the Rust crates."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, final

from typing_extensions import Never, Self, disjoint_base

__all__ = [
    "Arrays",
    "AtOnce",
    "BoundCall",
    "ClosedError",
    "CollectiveTimeoutError",
    "Comm",
    "ConfigError",
    "Error",
    "Lines",
    "MismatchError",
    "PeerLostError",
    "SymmetricBuffer",
    "TopologyError",
    "Work",
    "__version__",
    "bench_main",
    "cuda",
    "dump",
    "fabric",
    "frames_from",
    "info",
    "launched",
    "leave_error",
    "say",
    "set_exact",
    "settings",
    "shutdown",
    "stacks",
    "tells",
    "tensorflow",
    "tensorflow_waits",
    "undisturbed",
]

__version__: str

_T = TypeVar("_T")

# (address, elements): a flat buffer; a list of them: blocks that lie anywhere;
# (address, [elements, ...]): one buffer cut in uneven blocks; None: nothing on this rank.
_Blocks = tuple[int, int] | tuple[int, Sequence[int]] | Sequence[tuple[int, int]] | None

class _Store(Protocol):
    """What torch's stores can do."""

    def set(self, key: str, value: bytes, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> object: ...

class Error(RuntimeError): ...
class CollectiveTimeoutError(Error): ...
class MismatchError(Error): ...
class PeerLostError(Error): ...
class ClosedError(Error): ...
class TopologyError(Error): ...
class ConfigError(ValueError): ...

@final
class Work:
    """One call under way. Thread-safe; dropping it does not cancel the call."""

    def wait(self, timeout: float | None = None) -> None:
        """Drive the call until it is done. Releases the GIL; Ctrl-C gets through within half a second.

        Raises the call's error; CollectiveTimeoutError after `timeout` seconds (None: the call's own deadline).
        """
    def wait_stream(self, stream: int) -> None:
        """Have a CUDA stream (raw handle) wait for the end of a call on its device. The host does not wait.

        Raises the call's error if it has failed already.
        """
    def is_done(self) -> bool: ...
    def error(self) -> BaseException | None:
        """The exception a wait would raise now, without raising it."""
    def source(self) -> int:
        """The rank a receive got its message from; -1 before that and for all other calls."""
    def is_enqueued(self) -> bool:
        """Whether wait_stream would wait, now, for the other ranks to make the call."""
    def on_enqueued(self, callback: Callable[[], Any]) -> bool:
        """Call back once from a helper thread when all of it is on the device, or done; at once if it is already.

        False: it will not, since the interpreter exits or the process may not have another thread.
        """
    def on_done(self, callback: Callable[[], Any]) -> bool:
        """Call back once from a helper thread when done (well or not); at once if it is already. False as above."""

@final
class Comm:
    rank: int
    size: int
    name: str
    @staticmethod
    def make(
        store: _Store,
        call: str,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        known: tuple[Comm, Sequence[int], Sequence[Sequence[int]]] | None = None,
    ) -> Comm:
        """This rank's end of a group whose ranks all do this over the same store.

        call: what the user called for it, as errors name it. known: a group in which all of them are already, and their
        ranks there; it knows who is dead, and who does what. Then the ranks there of all groups of the same mesh
        dimension; empty: those of a mesh in rank order. Where nodes divide these groups differently, reductions are in
        canonical order.
        Raises CollectiveTimeoutError naming the ranks that did not come within `timeout` seconds, PeerLostError naming
        one that came and is gone, TopologyError where ranks cannot reach each other or one of them could not make the
        group at all, and whatever the store raises.
        """
    @staticmethod
    def join(
        call: str,
        name: str,
        rank: int,
        size: int,
        meet: tuple[str, int, bool] | None,
        timeout: float,
        local_size: int | None = None,
    ) -> Comm:
        """The same where rank 0 serves a store of its own at `meet`: host, port, whether all ranks are on that host.
        `local_size`: number of ranks on this host, where the launcher says it.

        None is for one rank alone. The deadline of calls that have none of their own is `timeout` from then on.
        Raises as `make`, and TopologyError where rank 0 cannot listen there, or nobody answers within `timeout`.
        """
    def split(self, color: int | None, key: int) -> Comm | None:
        """The group of the ranks of one color, in the order of their keys, as MPI_Comm_split; all ranks call it."""
    def collective(
        self,
        collective: int,
        dtype: int,
        redop: int,
        factor: float,
        root: int,
        input: _Blocks,
        output: _Blocks,
        keep: object,
        timeout: float,
        asynchronous: bool,
        device: int = ...,
        stream: int = 0,
    ) -> Work | None:
        """Collective numbers as in smddp_plan::Collective, dtype and redop as in smddp_core::types.

        Synchronous (returns None): the calling thread drives, with the GIL released. `keep` is held until the
        call is done. timeout in seconds, 0 = the group's. Raises ValueError for bad arguments before anything moves.
        device >= 0: the addresses are that CUDA device's, the call comes after what its stream `stream` (raw handle)
        holds by now, and a Work is returned always.
        """
    def send(self, buffer: tuple[int, int], dtype: int, dst: int, tag: int, keep: object, timeout: float) -> Work: ...
    def recv(self, buffer: tuple[int, int], dtype: int, src: int, tag: int, keep: object, timeout: float) -> Work:
        """src -1: from any rank."""
    def device_stream(self, device: int) -> int:
        """The raw handle of this group's stream on a CUDA device, which is made if need be."""
    def device_path(self, device: int) -> str | None:
        """How memory of a CUDA device goes within a node, in words; None before the first call on it."""
    def set_timeout(self, timeout: float) -> None: ...
    def abort(self, reason: str) -> None:
        """All waiters, here and at the peers, raise. Never blocks."""
    def finish(self, limit: float) -> None:
        """Leave together with the other ranks, waiting for them `limit` seconds at most.

        MismatchError where the ranks called different things and no call has raised so. The group is closed in any
        case.
        """
    @staticmethod
    def leave_seconds() -> float:
        """SMDDP_LEAVE_SECONDS."""
    def close(self) -> None:
        """Leave in good order. Never blocks for long; idempotent."""
    def let_go(self) -> None:
        """The same, for who goes on without this group: what a dead one still has to tell others is told meanwhile."""
    def error(self) -> BaseException | None:
        """Why this communicator is poisoned, or None."""
    def sequence(self) -> int:
        """Number of collectives started so far."""
    def path(self, collective: int, dtype: int, nbytes: int) -> str:
        """The way a call of that size takes, in words."""
    def estimate(self, collective: int, dtype: int, nbytes: int, root: int) -> float:
        """Seconds of a call of that size by the cost model; nothing moves."""
    def estimate_message(self, peer: int, nbytes: int) -> float:
        """The same of a message to or from a rank; -1: any."""
    def way(self) -> str:
        """What bytes go through: "shm", "tcp eth0 10.0.0.1", or both."""
    def network(self) -> str | None:
        """What the choice of segments and algorithms goes by between nodes, and how it is known; None on one node."""
    def nodes(self) -> list[int]:
        """The node of each rank, numbered by first appearance."""
    def taken(self) -> list[tuple[str, str, int, int, int]]:
        """(collective, algorithm, operations, bytes of whole buffers, bytes sent to other nodes) of what is over."""
    def arrived(self) -> list[int]:
        """Ranks that are known to have started the newest collective that this rank started."""

_Array = Any
"""numpy.ndarray, or anything with the buffer protocol or __dlpack__, contiguous, on the host or a CUDA device."""

_Reduction = str | tuple[str, float]
"""sum, avg, min, max, prod, band, bor, bxor, or ("premul_sum", factor).

avg of integers divides the wrapped sum, truncating: partial sums travel in the array's own type.
"""

@final
class AtOnce:
    """A group's calls on ordinary tensors, which are read in C. A new torch only.

    exchange: torch's DLPack exchange API. kinds: the classes of ordinary tensors. reductions: torch's and the core's
    numbers of them. zero: the timeout that is none. host: the group serves host memory, for callers that wait. Raises
    ValueError for an exchange API of an unknown version.

    Each call is over where it returns True, or the current stream of its device waits for it; its handle is for who
    does not wait for one on a device. False: nothing has moved, because a tensor or an option is not so ordinary.
    Raises the call's error.
    """

    def __new__(
        cls,
        comm: Comm,
        exchange: object,
        kinds: Sequence[type],
        reductions: Sequence[tuple[object, int]],
        zero: object,
        host: bool = True,
    ) -> Self: ...
    def meet(self, device: int, stream: object) -> None:
        """Calls on that CUDA device are served from now on. stream: torch's object for the group's stream there."""
    def all_reduce(self, tensors: object, opts: object) -> bool | Work: ...
    def broadcast(self, tensors: object, opts: object) -> bool | Work: ...
    def all_gather(self, output: object, input: object, opts: object) -> bool | Work: ...
    def reduce_scatter(self, output: object, input: object, opts: object) -> bool | Work: ...
    def all_to_all(
        self, output: object, input: object, output_splits: object, input_splits: object, opts: object
    ) -> bool | Work: ...

@final
class BoundCall:
    """A collective that `smddp.bind` has prepared: each call runs it on the present values of its tensors.

    Raises the call's error, and RuntimeError if a tensor has other memory or another shape than when it was bound.
    """

    def __new__(
        cls,
        comm: Comm,
        collective: int,
        dtype: int,
        redop: tuple[int, float],
        root: int,
        input: _Blocks,
        output: _Blocks,
        tensors: Sequence[object],
        timeout: float,
        translate: Callable[[BaseException], BaseException],
    ) -> Self: ...
    # Of a native class all of these say *args and **kwargs; it takes none.
    def __call__(self, *args: Never, **kwargs: Never) -> None:
        """The call, over when this returns."""
    def start(self) -> None:
        """Begins the call. Raises RuntimeError where one is begun that was not waited for."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for the call that was started, `timeout` seconds at most; None is the call's own deadline.

        Raises RuntimeError where none was started.
        """
    def is_done(self) -> bool:
        """Whether nothing is under way."""

@disjoint_base
class Arrays:
    """A group's calls on arrays; all ranks make the same collectives in the same order.

    Of every collective:
    out: where the result goes; it has the array's element type. Without it a new numpy array, or the array itself (in
    place) where it has the result's size.
    async_op: True returns a Work at once; arrays must be left alone until it is over, and are held until then.
    timeout: seconds or a timedelta; None is the group's.
    stream: for arrays on a CUDA device the raw handle of the caller's stream: the call comes after what that holds, and
    what comes next on it after the call; None is the default stream, with the host waiting for the end.
    Raises TypeError for element types that differ or do not move, ValueError for shapes that do not fit, arrays that
    are not contiguous, outputs that are read-only, and reductions that the type has not: before anything moves. Raises
    CollectiveTimeoutError, MismatchError, PeerLostError or ClosedError, which name operation, group and ranks.
    """

    def __new__(cls, comm: Comm) -> Self: ...
    @property
    def sent(self) -> dict[int, tuple[int, int]]:
        """Messages that this rank sent so far, and their bytes, by receiver."""
    def all_reduce(
        self,
        array: _Array,
        op: _Reduction | None = None,
        *,
        out: _Array | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """All ranks' arrays, reduced element by element (their sum); in place without `out`."""
    def reduce(
        self,
        array: _Array,
        op: _Reduction | None = None,
        root: int = 0,
        *,
        out: _Array | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """The same on rank `root` alone; None on the others, whose arrays stay as they are."""
    def broadcast(
        self,
        array: _Array,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank `root`'s array into all others'."""
    def all_gather(
        self,
        array: _Array,
        *,
        out: _Array | None = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """All ranks' arrays in rank order: of shape (size, *shape), or `out`, which has size times as many elements.

        counts: each rank's elements where these differ; the result is flat.
        """
    def gather(
        self,
        array: _Array,
        root: int = 0,
        *,
        out: _Array | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """The same on rank `root` alone, with blocks of one size; None on the others."""
    def reduce_scatter(
        self,
        array: _Array,
        op: _Reduction | None = None,
        *,
        out: _Array | None = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """This rank's block of the arrays' reduction: the first dimension cut in `size` equal blocks.

        counts: each rank's elements where these differ; the result is flat.
        """
    def scatter(
        self,
        array: _Array | None,
        out: _Array,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """This rank's block of rank `root`'s array, which no other rank needs to give, into `out`."""
    def all_to_all(
        self,
        array: _Array,
        *,
        out: _Array | None = None,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """Block r of this rank's array to rank r, and rank r's for this rank into block r: the first dimension is cut.

        counts: elements to each rank and from each rank where these differ; the result is flat.
        """
    def barrier(self, *, async_op: bool = False, timeout: float | timedelta | None = None) -> Work | None:
        """Returns when all ranks have called it."""
    def send(
        self, array: _Array, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | timedelta | None = None
    ) -> Work | None:
        """Send an array of the host to rank `dst`, which receives as many elements of that type with that tag."""
    def recv(
        self,
        out: _Array,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
    ) -> Any:
        """Receive from rank `src`, or from whoever sends first (None); returns `out`, or a Work whose `source()` says
        who it was.
        """

def launched(
    port: int | None = None,
) -> tuple[int, int, int | None, int | None, tuple[str, int, bool] | None] | None:
    """Returns this process's place among the ranks of its launcher, from the environment; None without a launcher.

    The values are rank, size, local rank and number of local ranks (None: the launcher does not set it), and the
    address of rank 0: host, port and whether all ranks are on this host (None with one rank).
    Raises ConfigError naming the variable that is missing or invalid, and the command to run.
    """

def settings() -> list[tuple[str, str, str, str, str]]:
    """(name, value, default, where the value came from, what it does) of every SMDDP_* setting."""

@final
class Lines:
    """Lines of the log, for whoever reads them instead of standard error; a forked child's go there again."""

    def __new__(cls, level: str) -> Self:
        """From `level` (WARN, INFO or TRACE) on, and what the settings ask for. Raises ValueError for another word."""
    def next(self) -> tuple[str, float, str] | None:
        """(level, seconds since 1970, text) of the next line; None once lines go elsewhere. Releases the GIL."""
    @staticmethod
    def close() -> None:
        """Lines go to standard error again."""

@final
class SymmetricBuffer:
    """Memory of this process that the other ranks of its node read where it lies; free again when it is dropped.

    Raises MemoryError where so much is not free in one piece, OSError where there is no such memory."""
    def __new__(cls, bytes: int) -> SymmetricBuffer: ...
    @property
    def address(self) -> int:
        """Where it begins: at a page."""
    @staticmethod
    def usage() -> tuple[int, int, int]:
        """(bytes of buffers, bytes that there may be, messages that were read where they lay) of this process."""

def set_exact(exact: bool) -> bool:
    """Has this thread's collectives leave elements as they are between nodes, or not; what they did before."""

def say(warning: bool, text: str) -> None:
    """A line of the log, where SMDDP_DEBUG asks for warnings, or for facts. Never raises."""

def tells() -> bool:
    """Whether the log tells facts: SMDDP_DEBUG=INFO or TRACE, or a logger that is enabled for them."""

def info() -> dict[str, Any]:
    """What was found on this machine: host, cores, SIMD level, what serves in a node and between nodes, staging."""

def cuda(start: bool = True) -> dict[str, Any]:
    """found (bool), why (if not), driver, devices (a line each): the CUDA driver of this machine.

    start: it may be initialised, after which a forked child cannot use CUDA; else no devices are told."""

def fabric() -> list[str]:
    """What libfabric offers here and why it would be used or not, in lines. Opens the library."""

def dump() -> str:
    """What the recorder has of this process's groups, as JSON."""

def stacks() -> bool:
    """Whether the settings let others be told where the main thread is."""

def frames_from(signal: int, pipe: int, inner: Sequence[str]) -> None:
    """From now on `signal` has the main thread write its frames into the other end of `pipe`, a descriptor that is the
    core's from now on. Frames of files under `inner` are left out where others are."""

def leave_error(text: str) -> None:
    """Have processes of this node that see this one go say that this was its last error.

    text: whose error, and what it is; 1,200 bytes of it count.
    """

def undisturbed(library: str, load: Callable[[], _T], /) -> _T:
    """Call `load` and return its result; restore signal handlers and the floating-point mode."""

def shutdown(seconds: float) -> None:
    """End the callbacks of futures, within `seconds`, then leave all groups in good order: the exit hook."""

def tensorflow(comm: Comm | None) -> None:
    """Tell the TensorFlow that is loaded of the ops, and which group they use from now on; None: they fail.

    Raises ImportError where no TensorFlow is loaded, or one without a function that is needed.
    """

def tensorflow_waits() -> bool:
    """Whether an op of a TensorFlow step is under way, on any thread."""

def bench_main(argv: Sequence[str]) -> int:
    """The smddp-bench program. Returns its exit status."""
