"""The native core, written in Rust. The Rust crates document the behaviour."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, final

from typing_extensions import Never, Self, disjoint_base

__all__ = [
    "Arrays",
    "BoundCall",
    "ClosedError",
    "CollectiveTimeoutError",
    "Comm",
    "ConfigError",
    "CorruptionError",
    "DeadlockError",
    "Error",
    "FastPath",
    "LogReader",
    "MismatchError",
    "PeerLostError",
    "SymmetricBuffer",
    "TopologyError",
    "Work",
    "__version__",
    "are_stacks_enabled",
    "bench_main",
    "cuda",
    "deprecated_settings",
    "dump",
    "fabric",
    "info",
    "is_info_enabled",
    "launched",
    "log_line",
    "set_exact",
    "set_frame_source",
    "set_last_error",
    "settings",
    "shutdown",
    "tensorflow",
    "tensorflow_is_pending",
    "undisturbed",
]

__version__: str

_T = TypeVar("_T")

# (address, elements): a contiguous buffer; a list of them: separate blocks; (address, [elements, ...]): one buffer of
# uneven blocks; None: no data on this rank.
_Blocks = tuple[int, int] | tuple[int, Sequence[int]] | Sequence[tuple[int, int]] | None

class _Store(Protocol):
    """Interface of torch's stores."""

    def set(self, key: str, value: bytes, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> object: ...

class Error(RuntimeError):
    """An operation or a group failed."""

class CollectiveTimeoutError(Error):
    """A deadline passed; the text names the missing ranks."""

class MismatchError(Error):
    """Two ranks made different calls; the text names both."""

class DeadlockError(Error):
    """Ranks wait for each other in a cycle; the text names each call."""

class PeerLostError(Error):
    """A rank died or left while it was needed."""

class CorruptionError(Error):
    """Data changed between two ranks, or results differ (SMDDP_AUDIT); the text names the ranks."""

class ClosedError(Error):
    """The group was aborted or destroyed."""

class TopologyError(Error):
    """Ranks cannot reach each other, or differ in version or settings."""

class ConfigError(ValueError):
    """A setting is not valid."""

@final
class Work:
    """Handle of a started call. Thread-safe; dropping it does not cancel the call."""

    def wait(self, timeout: float | None = None) -> None:
        """Drives the call to completion without the GIL. Ctrl-C interrupts it within half a second.

        Raises the call's error, or CollectiveTimeoutError after `timeout` seconds; None: the call's deadline.
        """
    def wait_stream(self, stream: int) -> None:
        """Makes a CUDA stream (raw handle), not the host, wait for a call on its device.

        Raises the call's error if it has already failed.
        """
    def is_done(self) -> bool: ...
    def error(self) -> BaseException | None:
        """Returns the exception that `wait` would raise now; None without an error."""
    def source(self) -> int:
        """Returns the sender's rank of a completed receive; -1 before completion and for other calls."""
    def is_enqueued(self) -> bool:
        """Returns whether the whole call is enqueued on the device, so that `wait_stream` does not block the host."""
    def on_enqueued(self, callback: Callable[[], Any]) -> bool:
        """Runs the callback once on a helper thread when the whole call is enqueued or done; now if it already is.

        Returns False without running it if the interpreter exits or the process cannot start a thread.
        """
    def on_done(self, callback: Callable[[], Any]) -> bool:
        """Runs the callback once on a helper thread when the call has completed or failed, as `on_enqueued`."""

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
        """Returns this rank's communicator of a group. All its ranks call this with the same store.

        call: the user's call, for errors. known: the communicator of a group that contains all these ranks, which
        detects dead ranks; their ranks in it; and the ranks in it of all groups of the same mesh dimension (empty: a
        mesh in rank order). If nodes divide these groups differently, reductions use the canonical order.
        Raises CollectiveTimeoutError naming the ranks that did not join within `timeout` seconds, PeerLostError naming
        a rank lost after it joined, TopologyError if ranks cannot reach each other or a rank failed to create the
        group, and the store's errors.
        """
    @staticmethod
    def join(
        call: str,
        name: str,
        rank: int,
        size: int,
        address: tuple[str, int, bool] | None,
        timeout: float,
        local_size: int | None = None,
    ) -> Comm:
        """Returns this rank's communicator of a group for which rank 0 serves the store.

        address: host and port of the store, and whether all ranks are on that host; None for a group of one rank.
        local_size: number of ranks on this host, if the launcher sets it. timeout: seconds, also the default deadline
        of later calls.
        Raises as `make`, and TopologyError if rank 0 cannot listen at `address` or does not answer within `timeout`.
        """
    def split(self, color: int | None, key: int) -> Comm | None:
        """Returns the group of the ranks with this color in the order of their keys, as MPI_Comm_split. Collective."""
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
        """Starts a collective. Numbers: smddp_plan::Collective; dtype and redop: smddp_core::types.

        A synchronous call returns None: the calling thread drives it without the GIL. keep: kept alive until the call
        is done. timeout: seconds; 0: the group's. device: -1 for host memory; a CUDA device's call runs after the work
        on its `stream` (raw handle) and always returns a Work.
        Raises ValueError for invalid arguments before any data is sent.
        """
    def send(self, buffer: tuple[int, int], dtype: int, dst: int, tag: int, keep: object, timeout: float) -> Work: ...
    def recv(self, buffer: tuple[int, int], dtype: int, src: int, tag: int, keep: object, timeout: float) -> Work:
        """Starts a receive. src: -1 for any rank."""
    def device_stream(self, device: int) -> int:
        """Returns the raw handle of this group's stream on a CUDA device; creates it on first use."""
    def device_path(self, device: int) -> str | None:
        """Returns the path of a CUDA device's memory within a node as text; None before the first call on it."""
    def set_timeout(self, timeout: float) -> None: ...
    def abort(self, reason: str) -> None:
        """Aborts pending calls on all ranks. Does not wait for them."""
    def finish(self, limit: float) -> None:
        """Closes the group together with the other ranks, and waits at most `limit` seconds for them.

        Raises MismatchError for mismatched calls that no call has reported. The group is closed in any case.
        """
    @staticmethod
    def leave_seconds() -> float:
        """Returns the value of SMDDP_LEAVE_SECONDS."""
    def close(self) -> None:
        """Closes the group and notifies the peers. Blocks only briefly; idempotent."""
    def close_in_background(self) -> None:
        """Closes the group of a process that continues. Pending notifications of an aborted group are sent later."""
    def error(self) -> BaseException | None:
        """Returns the error that aborted this communicator; None without one."""
    def sequence(self) -> int:
        """Returns the number of started collectives."""
    def path(self, collective: int, dtype: int, nbytes: int) -> str:
        """Returns the path of a call of `nbytes` as text."""
    def estimate(self, collective: int, dtype: int, nbytes: int, root: int) -> float:
        """Returns the seconds of a call of `nbytes` by the cost model. Sends no data."""
    def estimate_message(self, peer: int, nbytes: int) -> float:
        """Returns the seconds of a message to or from a rank by the cost model. peer: -1 for any rank."""
    def transports(self) -> str:
        """Returns the transports of the group: "shm", "tcp eth0 10.0.0.1", or both."""
    def network(self) -> str | None:
        """Returns the network parameters that select segments and algorithms, and their source; None on one node."""
    def nodes(self) -> list[int]:
        """Returns the node of each rank, numbered by first appearance."""
    def path_counters(self) -> list[tuple[str, str, int, int, int]]:
        """Returns a list of completed calls by collective and algorithm.

        Each entry: collective, algorithm, operations, bytes of whole buffers, bytes sent to other nodes.
        """
    def arrived(self) -> list[int]:
        """Returns the ranks known to have started the newest collective of this rank."""

_Array = Any
"""numpy.ndarray, or anything with the buffer protocol or __dlpack__, contiguous, on the host or a CUDA device."""

_Reduction = str | tuple[str, float]
"""sum, avg, min, max, prod, band, bor, bxor, or ("premul_sum", factor).

avg of integers divides the wrapped sum and truncates: partial sums have the array's type.
"""

@final
class FastPath:
    """Fast path for calls on ordinary tensors, whose metadata is read in C. Needs a torch with DLPack's exchange API.

    exchange: torch's DLPack exchange API. kinds: the classes of ordinary tensors. reductions: pairs of torch's
    reduction and the core's number. zero: the timeout that means the group's. host: the group serves host memory.
    Raises ValueError for an exchange API of an unknown version.

    A call returns True if it is complete, or if the current stream of its device waits for it. An asynchronous call on
    a device returns its handle. False: no data was sent, because a tensor or an option is not supported here.
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
    def add_device(self, device: int, stream: object) -> None:
        """Enables calls on a CUDA device. stream: torch's object for the group's stream on it."""
    def all_reduce(self, tensors: object, opts: object) -> bool | Work: ...
    def broadcast(self, tensors: object, opts: object) -> bool | Work: ...
    def all_gather(self, output: object, input: object, opts: object) -> bool | Work: ...
    def reduce_scatter(self, output: object, input: object, opts: object) -> bool | Work: ...
    def all_to_all(
        self, output: object, input: object, output_splits: object, input_splits: object, opts: object
    ) -> bool | Work: ...

@final
class BoundCall:
    """A collective prepared by `smddp.bind`. Each call runs it on the current values of its tensors.

    Raises the call's error, and RuntimeError if the memory or shape of a tensor has changed since it was bound.
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
    # The signature of a native `__call__` has *args and **kwargs; it accepts no arguments.
    def __call__(self, *args: Never, **kwargs: Never) -> None:
        """Runs the call to completion."""
    def start(self) -> None:
        """Starts the call. Raises RuntimeError if a started call was not waited for."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for the started call. timeout: seconds; None: the call's deadline.

        Raises RuntimeError if no call was started, and CollectiveTimeoutError after `timeout`.
        """
    def is_done(self) -> bool:
        """Returns whether no call is pending."""

@disjoint_base
class Arrays:
    """A group's calls on arrays. All ranks call the same collectives in the same order.

    Arguments of every collective:

    - `out`: array for the result, with the array's element type. Without it the result is a new numpy array, or the
      array itself (in place) if it has the result's size.
    - `async_op`: True returns a Work immediately. Do not change the arrays until it is done; it keeps them alive.
    - `timeout`: seconds or a timedelta; None: the group's.
    - `stream`: raw handle of the caller's CUDA stream, for arrays on a device. The call runs after the work on the
      stream, and later work on it runs after the call. None: the default stream, and the host waits for the call.

    Raises:
        TypeError: The element types differ or are not supported.
        ValueError: A shape is invalid, an array is not contiguous, an output is read-only, or the type does not support
            the reduction. No data is sent.
        CollectiveTimeoutError: The call did not complete before its deadline.
        MismatchError: Ranks made different calls.
        PeerLostError: A rank died or is unreachable.
        CorruptionError: Received data or results are corrupted.
        ClosedError: The group is closed, or failed earlier.
    """

    def __new__(cls, comm: Comm) -> Self: ...
    @property
    def sent(self) -> dict[int, tuple[int, int]]:
        """Sent messages and their bytes, by receiver."""
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
        """Reduces all ranks' arrays element by element, by default to their sum; in place without `out`.

        Args:
            array: Input of this rank. All ranks have the same number and type of elements.
            op: Reduction. Default: sum.

        Example:
            >>> comm.all_reduce(numpy.ones(3))
        """
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
        """Returns the reduction on rank `root`; None on other ranks, whose arrays are unchanged.

        Args:
            array: Input of this rank. All ranks have the same number and type of elements.
            op: Reduction. Default: sum.
            root: Rank of the result.
        """
    def broadcast(
        self,
        array: _Array,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        stream: int | None = None,
    ) -> Any:
        """Copies the array of rank `root` into the arrays of all other ranks.

        Args:
            array: Input on rank `root`, output on other ranks; of one size and type.
            root: Rank of the input.
        """
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
        """Returns all ranks' arrays in rank order, with shape (size, *shape), or in `out` with size times the elements.

        Args:
            array: Input of this rank.
            counts: Elements of each rank, if they differ; the result then has one dimension.
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
        """Returns all ranks' arrays on rank `root`; None on other ranks.

        Args:
            array: Input of this rank. All ranks have the same number and type of elements.
            root: Rank of the result.
        """
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
        """Returns this rank's block of the reduction, whose first dimension is divided into `size` equal blocks.

        Args:
            array: Input of this rank. All ranks have the same number and type of elements.
            op: Reduction. Default: sum.
            counts: Elements of each rank, if they differ; the result then has one dimension.
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
        """Copies this rank's block of the array of rank `root` into `out`.

        Args:
            array: Input on rank `root`, with `size` times the elements of `out`; None on other ranks.
            out: Output of this rank.
            root: Rank of the input.
        """
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
        """Sends block r of the array's first dimension to rank r, and receives block r of the result from rank r.

        Args:
            array: Input of this rank.
            counts: Elements to each rank and from each rank, if they differ; the result then has one dimension.
        """
    def barrier(self, *, async_op: bool = False, timeout: float | timedelta | None = None) -> Work | None:
        """Waits until all ranks have called it."""
    def send(
        self, array: _Array, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | timedelta | None = None
    ) -> Work | None:
        """Sends a host array to rank `dst`, which receives the same number and type of elements with the same tag.

        Args:
            array: Contiguous array on the host.
            dst: Rank of the receiver.
            tag: Number that the receiver gives, too.
        """
    def recv(
        self,
        out: _Array,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
    ) -> Any:
        """Receives a message into a host array.

        Args:
            out: Contiguous array on the host.
            src: Rank of the sender; None: any rank.
            tag: Number that the sender gave.

        Returns:
            `out`, or a Work whose `source()` is the sender.
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
    """Returns name, value, default, source of the value and description of every SMDDP_* setting."""

def deprecated_settings() -> list[tuple[str, str, str]]:
    """Returns name, replacement and equivalent values of the replacement, of every deprecated SMDDP_* setting."""

@final
class LogReader:
    """Reader of the log lines, which then do not go to standard error. A forked child logs to standard error again."""

    def __new__(cls, level: str) -> Self:
        """Reads lines of `level` (WARN, INFO or TRACE) and of SMDDP_DEBUG. Raises ValueError for another level."""
    def next(self) -> tuple[str, float, str] | None:
        """Returns level, seconds since 1970 and text of the next line; None after `close`. Releases the GIL."""
    @staticmethod
    def close() -> None:
        """Sends log lines to standard error again."""

@final
class SymmetricBuffer:
    """Memory of this process that the other ranks of its node read directly. Freed when the object is dropped.

    Raises MemoryError without a free block of that size, OSError if the system has no such memory.
    """
    def __new__(cls, bytes: int) -> SymmetricBuffer: ...
    @property
    def address(self) -> int:
        """Address of the first byte, at the start of a page."""
    @staticmethod
    def usage() -> tuple[int, int, int]:
        """Returns bytes in use, their limit, and the number of messages that were read in place, of this process."""

def set_exact(exact: bool) -> bool:
    """Sets whether this thread's collectives use no format between nodes. Returns the previous value."""

def log_line(warning: bool, text: str) -> None:
    """Logs one line, at level WARN or INFO. Never raises."""

def is_info_enabled() -> bool:
    """Returns whether level INFO is enabled by SMDDP_DEBUG or by a logger."""

def info() -> dict[str, Any]:
    """Returns facts about this machine: host, cores, SIMD level, transports in and between nodes, staging."""

def cuda(start: bool = True) -> dict[str, Any]:
    """Returns facts about the CUDA driver: found (bool), why (if not found), driver, devices (a line each).

    start: initialize the driver, after which a forked child cannot use CUDA; False: without devices.
    """

def fabric() -> list[str]:
    """Returns libfabric's providers, and the reason why each is used or not, as lines. Opens the library."""

def dump() -> str:
    """Returns the recorder's content for this process's groups as JSON."""

def are_stacks_enabled() -> bool:
    """Returns whether the settings allow other ranks to receive the main thread's frames."""

def set_frame_source(signal: int, pipe: int, inner: Sequence[str], packages: Sequence[str]) -> None:
    """Registers the signal on which the main thread writes its frames into the other end of `pipe`.

    pipe: a descriptor, which the core then owns. inner: folders whose frames are omitted if there are other frames.
    packages: folders whose frames are omitted if there are frames in neither list.
    """

def set_last_error(text: str) -> None:
    """Sets the last error that other processes of this node report if this process exits.

    text: rank and error; at most 1,200 bytes are kept.
    """

def undisturbed(library: str, load: Callable[[], _T]) -> _T:
    """Returns the result of `load`, and restores signal handlers and the floating-point mode after it."""

def shutdown(seconds: float) -> None:
    """Exit hook: finishes the callbacks of futures within `seconds`, then closes all groups."""

def tensorflow(comm: Comm | None) -> None:
    """Registers the ops with the loaded TensorFlow, and sets their group. None: the ops fail.

    Raises ImportError if no TensorFlow is loaded, or if it lacks a required function.
    """

def tensorflow_is_pending() -> bool:
    """Returns whether a TensorFlow op is pending on any thread."""

def bench_main(argv: Sequence[str]) -> int:
    """Runs the smddp-bench program. Returns its exit status."""
