"""The fast path of calls on CUDA tensors: which calls it accepts, and which it leaves to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import smddp
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from device import simulated as gpu
from device.machines import on_machines

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="the fast path needs torch.Tensor.__dlpack_c_exchange_api__ (torch 2.11)",
)
ACCESSIBLE = ("reference", "nodes")


def options(cls: type, handle: bool, **fields: Any) -> Any:
    made = cls()
    made.asyncOp = handle
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def filled(count: int, value: float, index: int = 0) -> torch.Tensor:
    return gpu.to(torch.full((count,), float(value)), index)


def holds(tensor: torch.Tensor, *values: float) -> None:
    assert gpu.host(tensor).tolist() == list(values)


def warm_fast_path() -> Any:
    """Returns the group's fast path after its first call on the device."""
    dist.all_reduce(filled(1, 1))
    return dist.group.WORLD._fast_path


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Records the addresses of the tensors passed to record_stream."""
    seen: list[int] = []
    true = gpu.OnDevice.record_stream

    def record(tensor: gpu.OnDevice, used: gpu.Stream) -> None:
        assert used.handle == dist.group.WORLD._comm.device_stream(0)
        seen.append(tensor.data_ptr())
        true(tensor, used)

    with mock.patch.object(gpu.OnDevice, "record_stream", record):
        yield seen


# Each function makes its call and returns the answer, the tensors of the call and a check of the result.
def all_reduce(path: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = filled(3, rank + 1)
    made = path.all_reduce([tensor], options(AllreduceOptions, handle))
    return made, [tensor], lambda: holds(tensor, *[size * (size + 1) / 2] * 3)


def broadcast(path: Any, handle: bool) -> Any:
    tensor = filled(2, dist.get_rank() + 7)
    made = path.broadcast([tensor], options(BroadcastOptions, handle, rootRank=1))
    return made, [tensor], lambda: holds(tensor, 8.0, 8.0)


def all_gather(path: Any, handle: bool) -> Any:
    output, tensor = gpu.empty(dist.get_world_size(), 2), filled(2, dist.get_rank())
    made = path.all_gather(output, tensor, options(AllgatherOptions, handle))
    expected = [rank for rank in range(dist.get_world_size()) for _ in range(2)]
    return made, [output, tensor], lambda: holds(output.view(-1), *expected)


def reduce_scatter(path: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(1), gpu.to(torch.arange(float(size)))
    made = path.reduce_scatter(output, tensor, options(ReduceScatterOptions, handle))
    return made, [output, tensor], lambda: holds(output, float(rank * size))


def all_to_all(path: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(size), gpu.to(torch.arange(float(size)) + 10 * rank)
    made = path.all_to_all(output, tensor, [], [], options(AllToAllOptions, handle))
    return made, [output, tensor], lambda: holds(output, *(10.0 * other + rank for other in range(size)))


CALLS: list[Callable[[Any, bool], Any]] = [all_reduce, broadcast, all_gather, reduce_scatter, all_to_all]


@on_machines(*ACCESSIBLE)
def test_a_synchronous_call_makes_the_stream_wait_and_records_no_stream():
    path = warm_fast_path()
    side = gpu.Stream(0)
    for stream in (gpu.current(0), side):
        with gpu.stream(stream):
            for call in CALLS:
                with recorded() as seen:
                    made, _, check = call(path, False)
                assert made is True, call
                assert not seen, call
                check()


@on_machines(*ACCESSIBLE)
def test_an_asynchronous_call_returns_the_cores_handle_and_records_each_tensor_once():
    path = warm_fast_path()
    for call in CALLS:
        with recorded() as seen:
            made, tensors, check = call(path, True)
        assert type(made).__name__ == "Work", call
        assert sorted(seen) == sorted(tensor.data_ptr() for tensor in tensors), call
        made.wait_stream(gpu.current(0).handle)
        check()


@on_machines(*ACCESSIBLE)
def test_a_call_through_torch_uses_it_and_returns_a_usual_handle():
    path, rank, size = warm_fast_path(), dist.get_rank(), dist.get_world_size()
    seen = []

    class Spy:
        def all_gather(self, *args: Any) -> Any:
            seen.append(path.all_gather(*args))
            return seen[-1]

    with mock.patch.object(dist.group.WORLD, "_fast_path", Spy()):
        output = gpu.empty(size)
        work = dist.all_gather_into_tensor(output, filled(1, rank), async_op=True)
        assert work.wait() is True
        holds(output, *map(float, range(size)))
        assert [tensor.data_ptr() for tensor in work.get_future().wait()] == [output.data_ptr()]
        assert work.exception() is None
        assert dist.all_gather_into_tensor(output, filled(1, rank + 1)) is None
        holds(output, *(other + 1.0 for other in range(size)))
    assert [type(made).__name__ for made in seen] == ["Work", "bool"]


@on_machines(*ACCESSIBLE)
def test_the_call_is_ordered_after_the_current_stream_only():
    path, rank, size = warm_fast_path(), dist.get_rank(), dist.get_world_size()
    output, source, target = gpu.empty(size), filled(1, rank + 5), filled(1, 0)
    stream = gpu.Stream(0)
    with gpu.stream(stream), gpu.Held(stream):
        target.copy_(source)
        work = path.all_gather(output, target, options(AllgatherOptions, True))
        assert not work.is_done()
    work.wait_stream(gpu.current(0).handle)
    holds(output, *(other + 5.0 for other in range(size)))


@on_machines(*ACCESSIBLE)
def test_calls_that_need_python_are_declined_before_any_transfer():
    group = dist.new_group(list(range(dist.get_world_size())))
    path, size = group._fast_path, dist.get_world_size()
    for handle in (False, True):
        assert path.all_reduce([filled(1, 1)], options(AllreduceOptions, handle)) is False, "first call on the device"
    dist.all_reduce(filled(1, 1), group=group)
    before = group._comm.sequence()
    for handle in (False, True):
        plain = options(AllreduceOptions, handle)
        strided, negated = filled(4, 1)[::2], torch._neg_view(filled(2, 1))
        freed = filled(2, 1).as_subclass(torch.Tensor).clone().as_subclass(gpu.OnDevice)
        freed.untyped_storage().resize_(0)
        for tensor in (filled(1, 1, index=1), strided, negated, filled(0, 1), freed):
            assert path.all_reduce([tensor], plain) is False, tensor.shape
        late = options(AllreduceOptions, handle, timeout=timedelta(seconds=5))
        assert path.all_reduce([filled(1, 1)], late) is False
        pairs = [
            (gpu.empty(size), filled(1, 1, index=1)),
            (gpu.empty(size, index=1), filled(1, 1)),
            (gpu.empty(size), torch.ones(1)),
            (torch.empty(size), filled(1, 1)),
            (gpu.empty(size + 1), filled(1, 1)),
        ]
        for output, tensor in pairs:
            assert path.all_gather(output, tensor, options(AllgatherOptions, handle)) is False
        stream, tensor = gpu.Stream(0), filled(1, 1)
        with gpu.stream(stream), gpu.capture(stream):
            assert path.all_reduce([tensor], plain) is False
            with pytest.raises(RuntimeError, match="cannot be captured"):
                dist.all_reduce(tensor, group=group, async_op=handle)
    assert path.all_reduce([torch.ones(1)], options(AllreduceOptions, True)) is False, "host memory and asynchronous"
    assert group._comm.sequence() == before
    dist.destroy_process_group(group)


@on_machines("reference")
def test_a_bound_group_refuses_another_device():
    path = warm_fast_path()
    assert path.all_reduce([filled(1, 1, index=1)], options(AllreduceOptions, False)) is False
    with mock.patch.object(dist.group.WORLD._cuda, "_bound", 0), pytest.raises(ValueError, match="bound to cuda:0"):
        dist.all_reduce(filled(1, 1, index=1))


@on_machines("reference")
def test_a_group_without_cpu_tensors_declines_them():
    comm = dist.group.WORLD._comm
    from smddp.torch.fast_path import fast_path

    assert fast_path(comm, host=False).all_reduce([torch.ones(1)], options(AllreduceOptions, False)) is False


@on_machines(*ACCESSIBLE)
def test_the_error_of_an_aborted_group_is_raised():
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(filled(1, 1), group=group)
    # All ranks have completed the call.
    dist.barrier()
    group._comm.abort("aborted by the test")
    for handle in (False, True):
        with pytest.raises(smddp.Error, match="aborted by the test"):
            dist.all_reduce(filled(1, 1), group=group, async_op=handle)


@on_machines("reference")
def test_a_small_call_needs_one_launch_and_at_most_four_memory_operations():
    warm_fast_path()
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(256 * size), filled(256, rank)
    memory_operations = ("cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2", "cuStreamBatchMemOp_v2")
    copies = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoDAsync_v2")
    dist.all_gather_into_tensor(output, tensor)
    for handle in (False, True):
        before = [gpu.driver.calls(*names) for names in (("cuLaunchKernel",), memory_operations, copies)]
        work = dist.all_gather_into_tensor(output, tensor, async_op=handle)
        if work is not None:
            work.wait()
        after = [gpu.driver.calls(*names) for names in (("cuLaunchKernel",), memory_operations, copies)]
        launches, of_operations, of_copies = (now - then for now, then in zip(after, before, strict=True))
        assert (launches, of_copies) == (1, 0)
        assert 2 <= of_operations <= 4
        holds(output, *(float(other) for other in range(size) for _ in range(256)))
