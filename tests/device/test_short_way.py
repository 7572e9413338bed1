"""Calls on CUDA tensors that one native function serves: taken by what it is right for, and by nothing else."""

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
    reason="torch.Tensor has no __dlpack_c_exchange_api__ (2.11 has), so there is no short way",
)
SHORT = ("reference", "nodes")


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


def meet() -> Any:
    """The short way of the group, once it has met the device."""
    dist.all_reduce(filled(1, 1))
    return dist.group.WORLD._at_once


@contextmanager
def recorded() -> Iterator[list[int]]:
    """The addresses of the tensors of which the allocator is told."""
    seen: list[int] = []
    true = gpu.OnDevice.record_stream

    def record(tensor: gpu.OnDevice, used: gpu.Stream) -> None:
        assert used.handle == dist.group.WORLD._comm.device_stream(0)
        seen.append(tensor.data_ptr())
        true(tensor, used)

    with mock.patch.object(gpu.OnDevice, "record_stream", record):
        yield seen


# Each makes its call, and gives what that answered, the tensors of the call and the check of its result.
def all_reduce(short: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = filled(3, rank + 1)
    made = short.all_reduce([tensor], options(AllreduceOptions, handle))
    return made, [tensor], lambda: holds(tensor, *[size * (size + 1) / 2] * 3)


def broadcast(short: Any, handle: bool) -> Any:
    tensor = filled(2, dist.get_rank() + 7)
    made = short.broadcast([tensor], options(BroadcastOptions, handle, rootRank=1))
    return made, [tensor], lambda: holds(tensor, 8.0, 8.0)


def all_gather(short: Any, handle: bool) -> Any:
    output, tensor = gpu.empty(dist.get_world_size(), 2), filled(2, dist.get_rank())
    made = short.all_gather(output, tensor, options(AllgatherOptions, handle))
    expected = [rank for rank in range(dist.get_world_size()) for _ in range(2)]
    return made, [output, tensor], lambda: holds(output.view(-1), *expected)


def reduce_scatter(short: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(1), gpu.to(torch.arange(float(size)))
    made = short.reduce_scatter(output, tensor, options(ReduceScatterOptions, handle))
    return made, [output, tensor], lambda: holds(output, float(rank * size))


def all_to_all(short: Any, handle: bool) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(size), gpu.to(torch.arange(float(size)) + 10 * rank)
    made = short.all_to_all(output, tensor, [], [], options(AllToAllOptions, handle))
    return made, [output, tensor], lambda: holds(output, *(10.0 * other + rank for other in range(size)))


CALLS: list[Callable[[Any, bool], Any]] = [all_reduce, broadcast, all_gather, reduce_scatter, all_to_all]


@on_machines(*SHORT)
def test_a_caller_that_waits_has_its_stream_waiting_and_the_allocator_is_not_told():
    short = meet()
    side = gpu.Stream(0)
    for stream in (gpu.current(0), side):
        with gpu.stream(stream):
            for call in CALLS:
                with recorded() as seen:
                    made, _, check = call(short, False)
                assert made is True, call
                assert not seen, call
                check()


@on_machines(*SHORT)
def test_a_handle_is_the_cores_and_the_allocator_is_told_of_each_tensor_once():
    short = meet()
    for call in CALLS:
        with recorded() as seen:
            made, tensors, check = call(short, True)
        assert type(made).__name__ == "Work", call
        assert sorted(seen) == sorted(tensor.data_ptr() for tensor in tensors), call
        made.wait_stream(gpu.current(0).handle)
        check()


@on_machines(*SHORT)
def test_a_call_through_torch_takes_it_and_its_handle_is_as_any():
    short, rank, size = meet(), dist.get_rank(), dist.get_world_size()
    seen = []

    class Spy:
        def all_gather(self, *args: Any) -> Any:
            seen.append(short.all_gather(*args))
            return seen[-1]

    with mock.patch.object(dist.group.WORLD, "_at_once", Spy()):
        output = gpu.empty(size)
        work = dist.all_gather_into_tensor(output, filled(1, rank), async_op=True)
        assert work.wait() is True
        holds(output, *map(float, range(size)))
        assert [tensor.data_ptr() for tensor in work.get_future().wait()] == [output.data_ptr()]
        assert work.exception() is None
        assert dist.all_gather_into_tensor(output, filled(1, rank + 1)) is None
        holds(output, *(other + 1.0 for other in range(size)))
    assert [type(made).__name__ for made in seen] == ["Work", "bool"]


@on_machines(*SHORT)
def test_the_call_comes_after_what_the_current_stream_holds_and_others_do_not_wait():
    short, rank, size = meet(), dist.get_rank(), dist.get_world_size()
    output, source, target = gpu.empty(size), filled(1, rank + 5), filled(1, 0)
    stream = gpu.Stream(0)
    with gpu.stream(stream), gpu.Held(stream):
        target.copy_(source)
        work = short.all_gather(output, target, options(AllgatherOptions, True))
        assert not work.is_done()
    work.wait_stream(gpu.current(0).handle)
    holds(output, *(other + 5.0 for other in range(size)))


@on_machines(*SHORT)
def test_what_python_must_look_at_goes_its_way_and_nothing_has_moved():
    group = dist.new_group(list(range(dist.get_world_size())))
    short, size = group._at_once, dist.get_world_size()
    for handle in (False, True):
        assert short.all_reduce([filled(1, 1)], options(AllreduceOptions, handle)) is False, "not met yet"
    dist.all_reduce(filled(1, 1), group=group)
    before = group._comm.sequence()
    for handle in (False, True):
        plain = options(AllreduceOptions, handle)
        strided, negated = filled(4, 1)[::2], torch._neg_view(filled(2, 1))
        freed = filled(2, 1).as_subclass(torch.Tensor).clone().as_subclass(gpu.OnDevice)
        freed.untyped_storage().resize_(0)
        for tensor in (filled(1, 1, index=1), strided, negated, filled(0, 1), freed):
            assert short.all_reduce([tensor], plain) is False, tensor.shape
        late = options(AllreduceOptions, handle, timeout=timedelta(seconds=5))
        assert short.all_reduce([filled(1, 1)], late) is False
        pairs = [
            (gpu.empty(size), filled(1, 1, index=1)),
            (gpu.empty(size, index=1), filled(1, 1)),
            (gpu.empty(size), torch.ones(1)),
            (torch.empty(size), filled(1, 1)),
            (gpu.empty(size + 1), filled(1, 1)),
        ]
        for output, tensor in pairs:
            assert short.all_gather(output, tensor, options(AllgatherOptions, handle)) is False
        stream, tensor = gpu.Stream(0), filled(1, 1)
        with gpu.stream(stream), gpu.capture(stream):
            assert short.all_reduce([tensor], plain) is False
            with pytest.raises(RuntimeError, match="cannot be captured"):
                dist.all_reduce(tensor, group=group, async_op=handle)
    assert short.all_reduce([torch.ones(1)], options(AllreduceOptions, True)) is False, "host memory, and a handle"
    assert group._comm.sequence() == before
    dist.destroy_process_group(group)


@on_machines("reference")
def test_a_bound_group_says_so_of_another_device():
    short = meet()
    assert short.all_reduce([filled(1, 1, index=1)], options(AllreduceOptions, False)) is False
    with mock.patch.object(dist.group.WORLD._cuda, "_bound", 0), pytest.raises(ValueError, match="bound to cuda:0"):
        dist.all_reduce(filled(1, 1, index=1))


@on_machines("reference")
def test_a_group_without_cpu_tensors_leaves_them_to_others():
    comm = dist.group.WORLD._comm
    from smddp.torch.fast_path import at_once

    assert at_once(comm, host=False).all_reduce([torch.ones(1)], options(AllreduceOptions, False)) is False


@on_machines(*SHORT)
def test_an_error_of_the_call_is_the_groups():
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(filled(1, 1), group=group)
    # All have made it.
    dist.barrier()
    group._comm.abort("the test says so")
    for handle in (False, True):
        with pytest.raises(smddp.Error, match="the test says so"):
            dist.all_reduce(filled(1, 1), group=group, async_op=handle)


@on_machines("reference")
def test_a_small_call_is_one_launch_and_four_calls_for_words_at_most():
    meet()
    rank, size = dist.get_rank(), dist.get_world_size()
    output, tensor = gpu.empty(256 * size), filled(256, rank)
    words = ("cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2", "cuStreamBatchMemOp_v2")
    copies = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoDAsync_v2")
    dist.all_gather_into_tensor(output, tensor)
    for handle in (False, True):
        before = [gpu.driver.calls(*names) for names in (("cuLaunchKernel",), words, copies)]
        work = dist.all_gather_into_tensor(output, tensor, async_op=handle)
        if work is not None:
            work.wait()
        after = [gpu.driver.calls(*names) for names in (("cuLaunchKernel",), words, copies)]
        launches, of_words, of_copies = (now - then for now, then in zip(after, before, strict=True))
        assert (launches, of_copies) == (1, 0)
        assert 2 <= of_words <= 4
        holds(output, *(float(other) for other in range(size) for _ in range(256)))
