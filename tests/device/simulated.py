"""Simulated CUDA for whole-stack tests: the fake driver's memory, streams and events, and tensors on its devices.

`install` replaces the one module that uses torch.cuda. The core opens the same driver, so its work and the work
enqueued here are ordered by streams only. An operation of torch on such a tensor first waits for the current stream. As
on a GPU, data of other streams may be missing.

Memory is allocated as in torch's allocator: from segments, and again after its stream and the recorded streams have
passed the point where it was freed. Freed memory is overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from smddp.torch import cuda, fast_path

_NOT_READY = 600
_NON_BLOCKING = 1
_NO_TIMING = 2
_SEGMENT = 32 << 20
_ALIGNMENT = 512

# Functions that read a tensor's metadata only: torch runs them without the device.
_LOOKS = frozenset(
    "__get__ __len__ data_ptr numel size stride dim is_contiguous is_neg is_conj is_complex is_floating_point "
    "is_inference element_size storage_offset untyped_storage view view_as view_as_real detach __getitem__ narrow "
    "chunk split t unbind flatten expand _debug_has_internal_overlap empty_like as_subclass".split()
)


class Driver:
    """Calls of the driver in this thread's context of a device."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._contexts = []
        for ordinal in range(count.value):
            context = ctypes.c_size_t()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts.append(context)

    def _ask(self, name: str, *arguments: Any) -> int:
        return getattr(self._library, name)(*arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._ask(name, *arguments)
        if code:
            raise RuntimeError(f"CUDA error: {name} answers {code}")

    def enter(self, device: int) -> None:
        self._call("cuCtxSetCurrent", self._contexts[device])

    def call(self, device: int, name: str, *arguments: Any) -> None:
        self.enter(device)
        self._call(name, *arguments)

    def give(self, device: int, name: str, *arguments: Any) -> int:
        """Returns the value that a function writes through its first argument."""
        value = ctypes.c_size_t()
        self.call(device, name, ctypes.byref(value), *arguments)
        return value.value

    def passed(self, device: int, event: int) -> bool:
        self.enter(device)
        code = self._ask("cuEventQuery", ctypes.c_size_t(event))
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA error: cuEventQuery answers {code}")
        return code == 0

    def open(self) -> int:
        """Returns the number of driver objects that this process holds."""
        return self._library.fake_open()

    def calls(self, *names: str) -> int:
        """Returns the number of this process's calls of the named functions."""
        return sum(self._library.fake_calls(name.encode()) for name in names)


driver: Driver


class Stream:
    def __init__(self, device: int, handle: int | None = None) -> None:
        self.device = device
        # Never destroyed, as those of torch's pool.
        self.handle = driver.give(device, "cuStreamCreateWithPriority", _NON_BLOCKING, 0) if handle is None else handle

    def record(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        driver.call(self.device, "cuStreamSynchronize", ctypes.c_size_t(self.handle))

    def wait_event(self, event: Event) -> None:
        driver.call(self.device, "cuStreamWaitEvent", ctypes.c_size_t(self.handle), ctypes.c_size_t(event.handle), 0)


class Event:
    """A place in the order of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.device = stream.device
        self.handle = driver.give(self.device, "cuEventCreate", _NO_TIMING)
        driver.call(self.device, "cuEventRecord", ctypes.c_size_t(self.handle), ctypes.c_size_t(stream.handle))

    def query(self) -> bool:
        return driver.passed(self.device, self.handle)

    def __del__(self) -> None:
        driver.call(self.device, "cuEventDestroy_v2", ctypes.c_size_t(self.handle))


_current = threading.local()
_defaults: dict[int, Stream] = {}
_pool: dict[tuple[int, int], Stream] = {}
_pool_index = itertools.count()


def pooled(device: int) -> Stream:
    """Returns one of four streams, round robin, as torch's futures do."""
    place = (device, next(_pool_index) % 4)
    return _pool.get(place) or _pool.setdefault(place, Stream(device))


def current(device: int) -> Stream:
    """Returns this thread's current stream; the legacy default stream outside of `stream`."""
    chosen = getattr(_current, "streams", {}).get(device)
    return chosen or _defaults.setdefault(device, Stream(device, 0))


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[Stream]:
    """Context with this current stream."""
    before = getattr(_current, "streams", {})
    _current.streams = {**before, chosen.device: chosen}
    try:
        yield chosen
    finally:
        _current.streams = before


# Memory


class Block:
    """Bytes of a segment, and the streams that use them."""

    def __init__(self, at: int, size: int, home: Stream) -> None:
        self.at, self.size = at, size
        self.streams = {home.handle: home}
        self.events: list[Event] = []


class Allocator:
    """The memory of one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._at = self._end = 0
        self.blocks: dict[int, Block] = {}
        self._freed: list[Block] = []
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> Block:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._collect()
            home = current(self.device)
            spare = self._free.get(size)
            if spare:
                at = spare.pop()
            else:
                if self._at + size > self._end:
                    segment = max(size, _SEGMENT)
                    self._at = driver.give(self.device, "cuMemAlloc_v2", ctypes.c_size_t(segment))
                    self._end = self._at + segment
                at, self._at = self._at, self._at + size
            block = self.blocks[at] = Block(at, size, home)
            return block

    def free(self, block: Block) -> None:
        with self._lock:
            del self.blocks[block.at]
            try:
                block.events = [used.record() for used in block.streams.values()]
            except RuntimeError as error:
                # torch aborts the process in this case.
                failures.append(error)
            self._freed.append(block)

    def _collect(self) -> None:
        unused = [block for block in self._freed if all(event.query() for event in block.events)]
        for block in unused:
            self._freed.remove(block)
            ctypes.memset(block.at, 0xEE, block.size)
            self._free.setdefault(block.size, []).append(block.at)

    def find(self, address: int) -> Block | None:
        with self._lock:
            return next((b for b in self.blocks.values() if b.at <= address < b.at + b.size), None)

    @property
    def in_use(self) -> int:
        """Returns the number of blocks that are allocated or that a stream may still use."""
        with self._lock:
            self._collect()
            return len(self.blocks) + len(self._freed)


# Errors while memory was freed, where an exception cannot propagate.
failures: list[Exception] = []
_allocators: dict[int, Allocator] = {}


def allocator(device: int) -> Allocator:
    return _allocators.setdefault(device, Allocator(device))


# Tensors


class OnDevice(torch.Tensor):
    """Memory of device `index`, which the host can access."""

    index = 0
    is_cpu = False
    is_cuda = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def get_device(self) -> int:
        return self.index

    def record_stream(self, used: Stream) -> None:
        record(self, used)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and _copy(*args):
            return args[0]
        name = getattr(func, "__name__", "")
        if name not in _LOOKS:
            finish(cls.index)
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, cls) and func is not torch.Tensor.copy_:
            with torch._C.DisableTorchFunctionSubclass():
                if made.numel() and allocator(cls.index).find(made.data_ptr()) is None:
                    return _place(made.as_subclass(torch.Tensor), cls.index)
        return made


class OnDevice1(OnDevice):
    index = 1


def _copy(target: torch.Tensor, source: torch.Tensor, *_: Any) -> bool:
    """Enqueues a copy between contiguous tensors. Returns False for others, which copy engines do not support."""
    with torch._C.DisableTorchFunctionSubclass():
        same = target.dtype == source.dtype and target.shape == source.shape
        if not (same and target.is_contiguous() and source.is_contiguous()) or source.is_conj() or source.is_neg():
            return False
        index = (target if isinstance(target, OnDevice) else source).index
        size = target.numel() * target.element_size()
        addresses = [ctypes.c_size_t(tensor.data_ptr()) for tensor in (target, source)]
        here = ctypes.c_size_t(current(index).handle)
        driver.call(index, "cuMemcpyAsync", *addresses, ctypes.c_size_t(size), here)
    return True


def _memory(size: int, dtype: torch.dtype, take: Callable[[int], tuple[int, Callable[[], None]]]) -> torch.Tensor:
    at, free = take(size)
    buffer = (ctypes.c_byte * size).from_address(at)
    weakref.finalize(buffer, free).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)


def _place(tensor: torch.Tensor, index: int) -> OnDevice:
    kind = (OnDevice, OnDevice1)[index]
    if not tensor.numel():
        return tensor.clone().as_subclass(kind)

    def take(size: int) -> tuple[int, Callable[[], None]]:
        block = allocator(index).take(size)
        return block.at, lambda: allocator(index).free(block)

    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory = _memory(plain.numel() * plain.element_size(), plain.dtype, take).view(plain.shape)
        # No stream uses new memory.
        memory.copy_(plain)
        return memory.as_subclass(kind)


def to(tensor: torch.Tensor, index: int = 0) -> OnDevice:
    """Returns a copy on the device."""
    return _place(tensor, index)


def empty(*shape: int, dtype: torch.dtype = torch.float32, index: int = 0) -> OnDevice:
    return _place(torch.empty(*shape, dtype=dtype), index)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory, after the current stream has finished."""
    if not isinstance(tensor, OnDevice):
        return tensor
    finish(tensor.index)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor).clone()


class Held:
    """Blocks a stream from the creation of this object until `release`."""

    def __init__(self, held: Stream) -> None:
        self._device = held.device
        self._word = driver.give(held.device, "cuMemHostAlloc", ctypes.c_size_t(4096), 0)
        ctypes.c_uint64.from_address(self._word).value = 0
        value = ctypes.c_uint64(1)
        driver.call(
            held.device, "cuStreamWaitValue64_v2", ctypes.c_size_t(held.handle), ctypes.c_size_t(self._word), value, 0
        )

    def release(self) -> None:
        ctypes.c_uint64.from_address(self._word).value = 1

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# Replacement of torch's exchange API


class _Tensor(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


_Describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
_Current = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("describe", _Describe),
        ("current", _Current),
    ]


_NAME = b"dlpack_exchange_api"
_ON_CUDA = 2


def exchange() -> Any:
    """Returns torch's API with the devices and streams of this module; None in a torch without the API."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    at = ctypes.pythonapi.PyCapsule_GetPointer
    at.restype, at.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    torchs = _Exchange.from_address(at(capsule, _NAME))

    def describe(tensor: torch.Tensor, out: Any) -> int:
        code = torchs.describe(tensor, out)
        if not code and isinstance(tensor, OnDevice):
            out[0].device, out[0].ordinal = _ON_CUDA, tensor.index
        return code

    def give_current(kind: int, device: int, stream: Any) -> int:
        stream[0] = current(device).handle
        return 0

    table = _Exchange(torchs.major, torchs.minor, None, torchs.others, _Describe(describe), _Current(give_current))
    # Never freed, like torch's table.
    _tables.append(table)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(table), _NAME, None)


_tables: list[_Exchange] = []


# Replacement of smddp.torch.cuda


class Future:
    """torch's future with devices: callbacks run on a pool stream, and readers of the value wait for it."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._value: Any = None
        self._error: BaseException | None = None

    def then(self, callback: Callable[[Any], Any]) -> Future:
        child = Future(self.devices)

        def run() -> None:
            with contextlib.ExitStack() as streams:
                for device in self.devices:
                    streams.enter_context(stream(pooled(device)))
                try:
                    value, error = callback(self), None
                except BaseException as raised:
                    value, error = None, raised
                child._end(value, error)

        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(run)
                return child
        run()
        return child

    def set_result(self, value: Any) -> None:
        self._end(value, None)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            self._value, self._error = value, error
            self._events = [current(device).record() for device in self.devices]
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Any:
        assert self._ended.wait(30), "the future is never completed"
        for event in self._events:
            current(event.device).wait_event(event)
        return self.value()

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def in_use() -> bool:
    return True


def here() -> int:
    return 0


def stream_of(device: int) -> int:
    return current(device).handle


def capturing(device: int) -> bool:
    status = ctypes.c_int()
    driver.call(device, "cuStreamIsCapturing", ctypes.c_size_t(current(device).handle), ctypes.byref(status))
    return status.value != 0


@contextlib.contextmanager
def capture(chosen: Stream) -> Iterator[None]:
    """Context in which the stream is captured into a graph, which is then destroyed."""
    driver.call(chosen.device, "cuStreamBeginCapture_v2", ctypes.c_size_t(chosen.handle), 0)
    try:
        yield
    finally:
        graph = ctypes.c_size_t()
        driver.call(chosen.device, "cuStreamEndCapture", ctypes.c_size_t(chosen.handle), ctypes.byref(graph))


def external(handle: int, device: int) -> Stream:
    return Stream(device, handle)


def record(tensor: torch.Tensor, used: Stream) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        block = allocator(used.device).find(tensor.data_ptr()) if tensor.numel() else None
    if block is not None:
        block.streams[used.handle] = used


def mark(device: int) -> Event:
    return current(device).record()


def wait_for(event: Event, device: int) -> None:
    current(device).wait_event(event)


_sides: dict[int, Stream] = {}


@contextlib.contextmanager
def on_side(device: int) -> Iterator[None]:
    side = _sides.get(device) or _sides.setdefault(device, Stream(device))
    with stream(side):
        yield


def finish(device: int) -> None:
    current(device).synchronize()


future = Future


def pinned(like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty(0, dtype=like.dtype)

    # Never freed: freeing waits for all streams, and torch keeps pinned memory as well.
    def take(size: int) -> tuple[int, Callable[[], None]]:
        return driver.give(0, "cuMemHostAlloc", ctypes.c_size_t(size), 0), lambda: None

    return _memory(like.numel() * like.element_size(), like.dtype, take)


def install() -> None:
    """Replaces torch.cuda in a rank, before it creates a group."""
    global driver
    driver = Driver(os.environ["SMDDP_CUDA_LIBRARY"])
    replaced = [
        name
        for name, value in vars(cuda).items()
        if getattr(value, "__module__", "") == cuda.__name__ and not name.startswith("_")
    ]
    for name in replaced:
        setattr(cuda, name, globals()[name])
    # Without it all calls use the Python path.
    if os.environ.get("SMDDP_TEST_SHORT", "1") == "1":
        fast_path.exchange = exchange
        fast_path.KINDS.extend((OnDevice, OnDevice1))
    # torch's broadcast queries it for 8-bit floats.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.accelerator.device_count = lambda: 2
    # torch's front ends dispatch tensor subclasses to their class; real CUDA tensors are plain.
    torch.distributed.distributed_c10d.has_torch_function = lambda tensors: False
