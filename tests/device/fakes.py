"""CUDA tensors without a GPU: host memory that reports a CUDA device, and fakes of the core and of torch.cuda that log
their calls.

Entries of the log: ("collective", number, device, stream), ("stream waits", stream), ("host waits", limit),
("record", id of the tensor, stream), ("copy", stream), ("event", number, stream), ("event waited", number, stream),
("host waits for stream", stream).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from smddp.torch import cuda
from smddp.torch.collectives import SmddpCollectives
from smddp.torch.collectives import cuda as device
from smddp.torch.loopback import Mailbox

HOST_BLOCKING = ("host waits", "host waits for stream")
COMM_STREAM = 9000
SIDE_STREAM = 500
POOL_STREAM = 700


class OnDevice(torch.Tensor):
    """Host memory that reports the device cuda:`index`."""

    index = 0
    log: list[tuple[Any, ...]]
    stream: Callable[[int], int]

    is_cpu = False
    is_cuda = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def get_device(self) -> int:
        return self.index

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            log, stream = OnDevice.log, OnDevice.stream(cls.index)
            log.append(("copy", stream))
        return super().__torch_function__(func, types, args, kwargs or {})


class OnDevice1(OnDevice):
    index = 1


class SparseOnDevice(OnDevice):
    layout = torch.sparse_coo


def on(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as a tensor of cuda:`index`."""
    return tensor.as_subclass((OnDevice, OnDevice1)[index])


class Event:
    def __init__(self, number: int) -> None:
        self.number = number
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Future:
    """torch's future with devices: callbacks run on pool streams, and a wait makes the waiter's stream wait."""

    def __init__(self, fake: FakeCuda, devices: tuple[int, ...]) -> None:
        self.devices = devices
        self._fake = fake
        self._callbacks: list[Callable[[], None]] = []
        self._done = False
        self._value: Any = None
        self._error: Exception | None = None

    def then(self, callback: Callable[[Any], Any]) -> Future:
        child = Future(self._fake, self.devices)

        def run() -> None:
            with self._fake.on_stream(POOL_STREAM):
                try:
                    child._value = callback(self)
                except Exception as error:
                    child._error = error
            child.set_result(child._value)

        if self._done:
            run()
        else:
            self._callbacks.append(run)
        return child

    def set_result(self, value: Any) -> None:
        self._done, self._value = True, value
        for callback in self._callbacks:
            callback()

    def done(self) -> bool:
        return self._done

    def wait(self) -> Any:
        assert self._done, "the future is never completed"
        if self._error is not None:
            raise self._error
        return self._value


class FakeCuda:
    """The functions of smddp.torch.cuda, with one current stream for each device."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams = {0: 100, 1: 101}
        self.captured = False
        self.events: list[Event] = []

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self.streams = self.streams, {index: stream + index for index in self.streams}
        try:
            yield
        finally:
            self.streams = before

    def in_use(self) -> bool:
        return True

    def here(self) -> int:
        return 0

    def stream_of(self, device: int) -> int:
        return self.streams[device]

    current = stream_of

    def capturing(self, device: int) -> bool:
        return self.captured

    def external(self, handle: int, device: int) -> int:
        return handle

    def record(self, tensor: torch.Tensor, stream: int) -> None:
        self.log.append(("record", id(tensor), stream))

    def mark(self, device: int) -> Event:
        self.events.append(Event(len(self.events)))
        self.log.append(("event", self.events[-1].number, self.streams[device]))
        return self.events[-1]

    def wait_for(self, event: Event, device: int) -> None:
        self.log.append(("event waited", event.number, self.streams[device]))

    def on_side(self, device: int) -> Any:
        return self.on_stream(SIDE_STREAM)

    def finish(self, device: int) -> None:
        self.log.append(("host waits for stream", self.streams[device]))

    def future(self, devices: tuple[int, ...]) -> Future:
        return Future(self, devices)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype)


class Native:
    """The core's handle of a call, which completes when the test calls `end`."""

    def __init__(self, log: list[tuple[Any, ...]], keep: Any) -> None:
        self.keep = keep
        self._log = log
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], Any]] = []

    def end(self, error: BaseException | None = None) -> None:
        self._done, self._error, self.keep = True, error, None
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self, timeout: float | None = None) -> None:
        self._log.append(("host waits", timeout))
        if self._error is not None:
            raise self._error

    def wait_stream(self, stream: int) -> None:
        if self._error is not None:
            raise self._error
        self._log.append(("stream waits", stream))

    def is_done(self) -> bool:
        return self._done

    def error(self) -> BaseException | None:
        return self._error

    def source(self) -> int:
        return 1

    def is_enqueued(self) -> bool:
        return True

    def on_done(self, callback: Callable[[], Any]) -> bool:
        if self._done:
            callback()
        else:
            self._callbacks.append(callback)
        return True


class Comm:
    """The core's communicator."""

    name = "fake"

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.calls: list[SimpleNamespace] = []
        self.works: list[Native] = []
        self._log = log

    def sequence(self) -> int:
        return len(self.calls)

    def collective(
        self, number, code, redop, factor, root, source, target, keep, limit, asynchronous, device=-1, stream=0
    ):
        self.calls.append(
            SimpleNamespace(
                number=number, code=code, redop=redop, root=root, source=source, target=target, limit=limit,
                asynchronous=asynchronous, device=device, stream=stream,
            )
        )  # fmt: skip
        self._log.append(("collective", number, device, stream))
        if device < 0 and not asynchronous:
            return None
        self.works.append(Native(self._log, keep))
        return self.works[-1]

    def device_stream(self, device: int) -> int:
        return COMM_STREAM + device

    def _message(self, what, buffer, dtype, peer, tag, keep):
        self._log.append((what, peer, tag, buffer[1]))
        self.works.append(Native(self._log, keep))
        return self.works[-1]

    def send(self, buffer, dtype, dst, tag, keep, timeout):
        return self._message("send", buffer, dtype, dst, tag, keep)

    def recv(self, buffer, dtype, src, tag, keep, timeout):
        return self._message("recv", buffer, dtype, src, tag, keep)


class Group(SmddpCollectives):
    """Rank 0 of two over the fake core, without observers."""

    _has_observers = False

    def __init__(self, fake: FakeCuda, *, bound: int | None = None, cpu: bool = True, cuda: bool = True) -> None:
        self.fake = fake
        self.log = fake.log
        self._comm = Comm(fake.log)
        self._rank, self._size, self._ranks = 0, 2, None
        self._others: dict[str, Any] = {}
        self._serves_cpu, self._serves_cuda, self._bound = cpu, cuda, bound
        self._mailbox = Mailbox(0, "fake")
        self._sent = {}
        self._count_sent = threading.Lock()
        self._timeout = timedelta(seconds=5)

    def _dispatched(self, method: str) -> None:
        """Returns None: this fake has no dispatcher group."""

    @property
    def native(self) -> Native:
        """Returns the handle of the newest call."""
        return self._comm.works[-1]

    def logged(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] in kinds]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replaces torch.cuda and the core's driver."""
    made = FakeCuda()
    names = [name for name, value in vars(cuda).items() if getattr(value, "__module__", "") == cuda.__name__]
    assert set(names) >= {"stream_of", "record", "future"}
    for name in names:
        if not name.startswith("_"):
            monkeypatch.setattr(cuda, name, getattr(made, name))
    OnDevice.log, OnDevice.stream = made.log, made.stream_of
    driver = {"found": True, "why": "", "driver": "580.1, CUDA 13.0", "devices": ["fake"]}
    monkeypatch.setattr(device, "core", lambda: SimpleNamespace(cuda=lambda: driver))
    made.driver = driver
    return made
