"""Calls with CUDA tensors: arguments of the core, refusals, and the order of streams."""

import gc
import inspect
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import smddp
import torch
import torch.distributed as dist
from smddp.torch import cuda
from smddp.torch.collectives.base import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)

from device.fakes import COMM_STREAM, HOST_BLOCKING, POOL_STREAM, SIDE_STREAM, Group, Native, SparseOnDevice, on

c10d = torch._C._distributed_c10d


def ones(*shape: int, index: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return on(index, torch.ones(*shape, dtype=dtype))


def options(kind, *, sync: bool = False, **values):
    made = kind()
    made.asyncOp = not sync
    for name, value in values.items():
        setattr(made, name, value)
    return made


# name: (collective's number, the call on a group of two ranks, tensors that the comm stream touches at least)
CALLS = {
    "all_gather list": (ALL_GATHER, lambda g: g.allgather([[ones(2), ones(2)]], [ones(2)]), 3),
    "all_gather": (ALL_GATHER, lambda g: g.all_gather_single(ones(4), ones(2)), 2),
    "all_gather old name": (ALL_GATHER, lambda g: g._allgather_base(ones(4), ones(2)), 2),
    "reduce_scatter list": (REDUCE_SCATTER, lambda g: g.reduce_scatter([ones(2)], [[ones(2), ones(2)]]), 3),
    "reduce_scatter": (REDUCE_SCATTER, lambda g: g.reduce_scatter_single(ones(2), ones(4)), 2),
    "all_reduce": (ALL_REDUCE, lambda g: g.allreduce([ones(3)]), 1),
    "broadcast": (BROADCAST, lambda g: g.broadcast([ones(3)], 1), 1),
    "reduce": (REDUCE, lambda g: g.reduce([ones(3)], 0), 1),
    "gather at the root": (GATHER, lambda g: g.gather([[ones(2), ones(2)]], [ones(2)], 0), 3),
    "gather elsewhere": (GATHER, lambda g: g.gather([], [ones(2)], 1), 1),
    "gather_into_tensor": (GATHER, lambda g: g.gather_single(ones(4), ones(2)), 2),
    "scatter at the root": (SCATTER, lambda g: g.scatter([ones(2)], [[ones(2), ones(2)]], 0), 3),
    "scatter elsewhere": (SCATTER, lambda g: g.scatter([ones(2)], [], 1), 1),
    "all_to_all": (ALL_TO_ALL, lambda g: g.alltoall([ones(1), ones(2)], [ones(1), ones(3)]), 4),
    "all_to_all_single": (ALL_TO_ALL, lambda g: g.all_to_all_single(ones(4), ones(4), [], []), 2),
    "all_to_all_single uneven": (ALL_TO_ALL, lambda g: g.all_to_all_single(ones(4), ones(3), [1, 3], [1, 2]), 2),
}
COALESCED = {
    "all_reduce": lambda g: g.allreduce_coalesced([ones(1), ones(2)]),
    "all_gather": lambda g: g.all_gather_single_coalesced([ones(2), ones(4)], [ones(1), ones(2)]),
    "all_gather list": lambda g: g.allgather_coalesced([[ones(1), ones(2)] for _ in range(2)], [ones(1), ones(2)]),
    "reduce_scatter": lambda g: g.reduce_scatter_single_coalesced([ones(1), ones(2)], [ones(2), ones(4)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_collective_passes_device_and_stream_to_the_core_and_never_blocks_the_host(fake, name):
    number, call, touched = CALLS[name]
    group = Group(fake)
    fake.streams[0] = 321
    work = call(group)
    made = group._comm.calls[-1]
    assert (made.number, made.device, made.stream, made.asynchronous) == (number, 0, 321, True)
    recorded = group.logged("record")
    assert len(recorded) == len({tensor for _, tensor, _ in recorded}) >= touched
    assert {stream for *_, stream in recorded} == {COMM_STREAM}
    fake.streams[0] = 654
    assert work.wait() is True
    assert group.logged("stream waits") == [("stream waits", 654)]
    assert not group.logged(*HOST_BLOCKING)


@pytest.mark.parametrize("name", COALESCED)
def test_coalesced_calls_are_one_handle(fake, name):
    group = Group(fake)
    work = COALESCED[name](group)
    assert len(group._comm.calls) == 2
    work.wait()
    assert group.logged("stream waits") == [("stream waits", 100)] * 2
    assert not group.logged(*HOST_BLOCKING)
    assert work.devices == (0,)


def test_the_order_is_call_record_wait(fake):
    group = Group(fake)
    group.allreduce([ones(1)]).wait()
    assert [kind for kind, *_ in group.log] == ["collective", "record", "stream waits"]


def test_a_synchronous_call_makes_the_callers_stream_wait_before_it_returns(fake):
    group = Group(fake)
    strided = on(0, torch.zeros(4, 2))[:, 0]
    group.allreduce([strided], options(c10d.AllreduceOptions, sync=True))
    assert not group._comm.calls[-1].asynchronous
    assert [kind for kind, *_ in group.log if kind != "record"][-3:] == ["stream waits", "copy", "event"]
    assert not group.logged(*HOST_BLOCKING)


def test_a_synchronous_call_records_no_stream_with_the_allocator(fake, monkeypatch):
    group = Group(fake)
    group.allreduce([ones(1)], options(c10d.AllreduceOptions, sync=True))
    assert not group.logged("record")

    def interrupted(native, stream):
        raise KeyboardInterrupt

    # The call continues although no stream waits.
    monkeypatch.setattr(Native, "wait_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.allreduce([ones(1)], options(c10d.AllreduceOptions, sync=True))
    assert [stream for *_, stream in group.logged("record")] == [COMM_STREAM]


def test_calls_in_a_coalescing_block_wait_together(fake):
    group = Group(fake)
    device = torch.device("cuda", 0)
    group._start_coalescing(device)
    group.allreduce([ones(1)], options(c10d.AllreduceOptions))
    group.broadcast([ones(1)], options(c10d.BroadcastOptions, rootRank=1))
    work = group._end_coalescing(device)
    assert not group.logged("stream waits")
    work.wait()
    assert len(group.logged("stream waits")) == 2


def test_each_device_has_its_own_streams(fake):
    group = Group(fake)
    group.allreduce([ones(1)]).wait()
    group.allreduce([ones(1, index=1)]).wait()
    assert [(made.device, made.stream) for made in group._comm.calls] == [(0, 100), (1, 101)]
    assert [stream for *_, stream in group.logged("record")] == [COMM_STREAM, COMM_STREAM + 1]
    assert group.logged("stream waits") == [("stream waits", 100), ("stream waits", 101)]


def test_cpu_tensors_of_the_same_group_use_the_host_path(fake):
    group = Group(fake)
    group.allreduce([torch.ones(1)], options(c10d.AllreduceOptions))
    assert group._comm.calls[-1].device == -1
    assert group.log == [("collective", ALL_REDUCE, -1, 0)]


# Refusals


def refused(group, kind, words, call):
    before = len(group.log)
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert len(group.log) == before, "something was enqueued"


@pytest.mark.parametrize(
    ("output", "input", "words"),
    [
        (lambda: ones(4), lambda: ones(2, index=1), ("cuda:0", "cuda:1")),
        (lambda: torch.ones(4), lambda: ones(2), ("cuda:0", "cpu")),
        (lambda: ones(4), lambda: torch.ones(2), ("cpu", "cuda:0")),
    ],
)
def test_tensors_of_one_call_are_on_one_device(fake, output, input, words):
    group = Group(fake)
    refused(group, ValueError, ("one device", *words), lambda: group.all_gather_single(output(), input()))
    refused(
        group, ValueError, ("one device", *words), lambda: group.all_to_all_single(output(), input(), [2, 2], [1, 1])
    )


def test_a_bound_group_accepts_only_its_own_device(fake):
    group = Group(fake, bound=1)
    refused(group, ValueError, ("bound to cuda:1", "cuda:0"), lambda: group.allreduce([ones(1)]))
    refused(group, ValueError, ("bound to cuda:1", "cuda:0"), lambda: group.send([ones(1)], 1))
    group.allreduce([ones(1, index=1)]).wait()


@pytest.mark.parametrize("name", [*CALLS, *COALESCED])
def test_capture_is_refused_before_anything_is_enqueued(fake, name):
    group = Group(fake)
    call = CALLS[name][1] if name in CALLS else COALESCED[name]
    fake.captured = True
    refused(group, RuntimeError, ("cannot be captured into a CUDA graph yet",), lambda: call(group))
    fake.captured = False
    call(group).wait()


def test_messages_barriers_and_waits_refuse_capture_too(fake):
    group = Group(fake)
    work = group.allreduce([ones(1)])
    fake.captured = True
    refused(group, RuntimeError, ("CUDA graph",), lambda: group.send([ones(1)], 1))
    refused(group, RuntimeError, ("CUDA graph",), lambda: group.recv([ones(1)], 1))
    refused(group, RuntimeError, ("CUDA graph",), group.barrier)
    refused(group, RuntimeError, ("CUDA graph",), work.wait)
    fake.captured = False
    work.wait()


def test_sparse_tensors_are_refused(fake):
    group = Group(fake)
    sparse = torch.ones(2).as_subclass(SparseOnDevice)
    refused(group, ValueError, ("layout", "sparse_coo"), lambda: group.allreduce([sparse]))
    refused(group, ValueError, ("layout", "sparse_coo"), lambda: group.allreduce_sparse([sparse]))
    refused(group, ValueError, ("layout", "sparse_coo"), lambda: group.broadcast([sparse], 0))


def test_tensors_without_memory_are_refused(fake):
    group = Group(fake)
    freed = ones(6)
    freed.untyped_storage().resize_(0)
    refused(group, ValueError, ("(6,)", "no memory"), lambda: group.allreduce([freed]))


def freed(*shape, of=lambda tensor: tensor):
    tensor = of(ones(*shape))
    tensor.untyped_storage().resize_(0)
    return tensor


def column(tensor):
    return tensor[:, 1]


def test_views_into_freed_memory_are_refused(fake):
    """FSDP frees parameters like this: the addresses of views are not 0."""
    group = Group(fake)
    refused(group, ValueError, ("(2,)", "no memory"), lambda: group.allreduce([freed(6, of=lambda t: t[4:])]))
    refused(group, ValueError, ("(2,)", "no memory"), lambda: group.send([freed(6, of=lambda t: t[4:])], 1))


def test_messages_and_strided_tensors_without_memory_are_refused(fake):
    group = Group(fake)
    refused(group, ValueError, ("(6,)", "no memory"), lambda: group.send([freed(6)], 1))
    refused(group, ValueError, ("(6,)", "no memory"), lambda: group.recv([freed(6)], 1))
    for call in (
        lambda: group.allreduce([freed(4, 2, of=column)]),
        lambda: group.broadcast([freed(4, 2, of=column)], 1),
        lambda: group.send([freed(4, 2, of=column)], 1),
    ):
        refused(group, ValueError, ("(4,)", "no memory"), call)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.allreduce_coalesced([ones(2), freed(2)]),
        lambda g: g.allgather_coalesced([[ones(2), ones(2)], [ones(2), ones(2)]], [ones(2), freed(2)]),
        lambda g: g.allgather_into_tensor_coalesced([ones(4), freed(4)], [ones(2), ones(2)]),
        lambda g: g.reduce_scatter_tensor_coalesced([ones(2), ones(2)], [ones(4), freed(4)]),
    ],
)
def test_a_later_part_without_memory_is_refused_before_the_first_starts(fake, call):
    group = Group(fake)
    refused(group, ValueError, ("no memory",), lambda: call(group))


def test_without_a_driver_the_error_has_the_cores_reason(fake):
    fake.driver.update(found=False, why="libcuda.so.1 was not found")
    group = Group(fake)
    refused(group, RuntimeError, ("CUDA", "libcuda.so.1 was not found"), lambda: group.allreduce([ones(1)]))


def test_the_error_of_a_group_without_cuda_names_the_remedy(fake):
    group = Group(fake, cuda=False)
    refused(group, RuntimeError, ("cuda:0", "cpu:smddp,cuda:smddp"), lambda: group.allreduce([ones(1)]))
    gloo = Group(fake, cpu=False)
    refused(gloo, RuntimeError, ("no backend for CPU tensors",), lambda: gloo.allreduce([torch.ones(1)]))
    gloo.allreduce([ones(1)]).wait()


def test_other_devices_are_refused(fake):
    group = Group(fake)
    refused(group, RuntimeError, ("meta", "BACKEND"), lambda: group.allreduce([torch.empty(1, device="meta")]))


# Strided outputs


def test_strided_outputs_are_filled_after_the_stream_has_waited(fake):
    group = Group(fake)
    base = torch.zeros(4, 2)
    output = on(0, base)[:, 0]
    work = group.all_gather_single(output, ones(2))
    buffer = next(tensor for tensor in group.native.keep if tensor is not output and tensor.numel() == 4)
    assert buffer.is_cuda and buffer.is_contiguous()
    buffer.fill_(7)
    assert {tensor for _, tensor, _ in group.logged("record")} >= {id(buffer), id(output)}
    work.wait()
    assert [kind for kind, *_ in group.log if kind != "record"][1:] == ["stream waits", "copy", "event"]
    assert base.tolist() == [[7.0, 0.0]] * 4


def test_a_second_waiter_waits_for_the_copies_without_repeating_them(fake):
    group = Group(fake)
    work = group.allreduce([on(0, torch.ones(4, 2))[:, 0]])
    group.log.clear()
    work.wait()
    with fake.on_stream(42):
        work.wait()
    assert len(group.logged("copy")) == 1
    assert group.logged("event waited") == [("event waited", 0, 42)]
    assert group.log[-2:] == [("stream waits", 42), ("event waited", 0, 42)]


def test_without_a_waiter_the_copies_run_on_a_side_stream(fake):
    group = Group(fake)
    base = torch.ones(4, 2)
    work = group.allreduce([on(0, base)[:, 0]])
    assert not work.is_completed()
    group.native.end()
    assert group.logged("copy")[-1] == ("copy", SIDE_STREAM)
    assert not work.is_completed(), "the copies are pending"
    fake.events[-1].passed = True
    assert work.is_completed()
    assert work.is_success()
    work.wait()
    assert group.logged("event waited") == [("event waited", 0, 100)]


def test_a_failed_call_copies_nothing(fake):
    group = Group(fake)
    base = torch.ones(4, 2)
    work = group.allreduce([on(0, base)[:, 0]])
    before = len(group.logged("copy"))
    group.native.end(smddp.PeerLostError("rank 1 died"))
    assert len(group.logged("copy")) == before
    assert work.is_completed() and not work.is_success()
    with pytest.raises(dist.DistBackendError, match="rank 1 died"):
        work.wait()
    assert isinstance(work.exception(), smddp.PeerLostError)


# Handles


def test_a_wait_with_a_timeout_blocks_the_host_up_to_it(fake):
    group = Group(fake)
    group.allreduce([ones(1)]).wait(timedelta(seconds=3))
    assert group.logged("host waits", "stream waits") == [("host waits", 3.0), ("stream waits", 100)]


def test_synchronize_and_block_current_stream_are_stream_waits(fake):
    group = Group(fake)
    work = group.allreduce([ones(1)])
    work.synchronize()
    work.block_current_stream()
    assert len(group.logged("stream waits")) == 2
    assert not group.logged(*HOST_BLOCKING)
    assert not work.is_completed()
    group.native.end()
    assert work.is_completed() and work.is_success() and work.exception() is None


def test_tensors_live_until_the_device_has_finished(fake):
    group = Group(fake)
    tensor = ones(1)
    reference = weakref.ref(tensor)
    work = group.allreduce([tensor])
    native = group.native
    del tensor, work
    gc.collect()
    assert reference() is not None
    native.end()
    gc.collect()
    assert reference() is None


def test_a_future_is_complete_immediately_and_its_callbacks_run_after_the_call(fake):
    group = Group(fake)
    tensor = ones(1)
    work = group.allreduce([tensor])
    order = []
    future = work.get_future()
    assert future.devices == (0,)
    assert future.done(), "a waiter must not block until the device has finished"
    chained = future.then(lambda f: order.append(fake.stream_of(0)) or f.wait()[0])
    assert group.logged("stream waits") == [("stream waits", POOL_STREAM)]
    assert order == [POOL_STREAM]
    assert chained.wait() is tensor
    assert not group.logged(*HOST_BLOCKING)


def test_a_future_of_strided_outputs_includes_the_copies(fake):
    group = Group(fake)
    work = group.allreduce([on(0, torch.ones(4, 2))[:, 0]])
    group.log.clear()
    work.get_future()
    assert [entry[:1] + entry[-1:] for entry in group.log if entry[0] != "record"] == [
        ("stream waits", POOL_STREAM),
        ("copy", POOL_STREAM),
        ("event", POOL_STREAM),
    ]


def test_a_future_of_a_failed_call_raises_its_error(fake):
    group = Group(fake)
    work = group.allreduce([ones(1)])
    group.native.end(smddp.PeerLostError("rank 1 died"))
    with pytest.raises(dist.DistBackendError, match="rank 1 died"):
        work.get_future().wait()


def test_a_future_of_several_calls_has_all_their_devices(fake):
    group = Group(fake)
    group._start_coalescing(torch.device("cuda", 0))
    group.allreduce([ones(1)], options(c10d.AllreduceOptions))
    group.allreduce([ones(1, index=1)], options(c10d.AllreduceOptions))
    future = group._end_coalescing(torch.device("cuda", 0)).get_future()
    assert future.devices == (0, 1)
    assert future.done()
    assert len(future.wait()) == 2


# Barriers


def test_a_barrier_waits_for_the_enqueued_work(fake):
    group = Group(fake)
    group.barrier()
    assert not group.logged(*HOST_BLOCKING), "no CUDA tensor was used"
    group.allreduce([ones(1, index=1)])
    group.log.clear()
    group.barrier()
    assert group.log == [("host waits for stream", 101), ("collective", BARRIER, -1, 0)]


def test_a_bound_group_waits_for_its_device_from_the_first_barrier_on(fake):
    group = Group(fake, bound=1)
    group.barrier()
    assert group.log == [("host waits for stream", 101), ("collective", BARRIER, -1, 0)]


def test_a_barrier_waits_for_the_requested_device(fake):
    group = Group(fake)
    group.barrier(options(c10d.BarrierOptions, device=torch.device("cuda", 1)))
    assert group.logged(*HOST_BLOCKING) == [("host waits for stream", 101)]


def test_a_barrier_waits_for_the_devices_of_device_ids(fake):
    group = Group(fake)
    group.barrier(options(c10d.BarrierOptions, device=torch.device("cpu"), device_ids=[1]))
    assert group.logged(*HOST_BLOCKING) == [("host waits for stream", 101)]


def test_a_barrier_on_cuda_waits_for_the_current_device_or_the_groups_own(fake):
    group = Group(fake)
    group.barrier(options(c10d.BarrierOptions, device=torch.device("cuda")))
    assert group.logged(*HOST_BLOCKING) == [("host waits for stream", 100)]
    group.log.clear()
    bound = Group(fake, bound=1)
    bound.barrier(options(c10d.BarrierOptions, device=torch.device("cuda")))
    assert bound.logged(*HOST_BLOCKING) == [("host waits for stream", 101)]


# Messages


def test_pinned_memory_is_on_the_host_with_any_default_device(monkeypatch):
    # torch caches its constructors at the first default device, so this runs before one is replaced.
    with torch.device("meta"):
        assert torch.empty(1).is_meta
    empty = torch.empty
    like = empty(3, 2)
    # Pinning needs a GPU.
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    with torch.device("meta"):
        made = cuda.pinned(like)
    assert made.is_cpu and made.shape == (6,)


def test_a_send_copies_to_the_host_before_the_message_is_sent(fake):
    group = Group(fake)
    work = group.send([ones(5)], 1, 3)
    assert group.log == [("copy", 100), ("host waits for stream", 100), ("send", 1, 3, 5)]
    work.wait()
    assert group.log[-1] == ("host waits", None)


def test_a_receive_copies_to_the_device_on_the_waiters_stream(fake):
    group = Group(fake)
    base = torch.zeros(3, 2)
    work = group.recv([on(0, base)[:, 1]], 1, 3)
    assert group.log == [("event", 0, 100), ("recv", 1, 3, 3)]
    host = group.native.keep[1]
    assert host.is_cpu
    host.copy_(torch.tensor([1.0, 2.0, 3.0]))
    with fake.on_stream(42):
        work.wait()
    # The stream that posted the receive may still use the tensor.
    assert [entry for entry in group.log if entry[0] != "record"][2:] == [
        ("host waits", None),
        ("event waited", 0, 42),
        ("copy", 42),
        ("event", 1, 42),
    ]
    assert base[:, 1].tolist() == [1.0, 2.0, 3.0]
    assert work.source_rank() == 1


def test_a_future_of_a_receive_is_complete_when_the_message_arrived(fake):
    group = Group(fake)
    future = group.recv([ones(1)], 1).get_future()
    assert not future.done()
    group.native.end()
    assert future.done()


def test_messages_to_the_own_rank_keep_their_order(fake):
    group = Group(fake)
    target = on(0, torch.zeros(2))
    work = group.recv([target], 0, 1)
    group.send([on(0, torch.tensor([3.0, 4.0]))], 0, 1).wait()
    work.wait()
    assert target.tolist() == [3.0, 4.0]


def test_a_receive_into_overlapping_memory_is_refused(fake):
    group = Group(fake)
    refused(group, ValueError, ("several elements in one place",), lambda: group.recv([ones(1).expand(4)], 1))


# Groups


@pytest.mark.parametrize(
    ("backend", "ours"),
    [("smddp", (True, True)), ("cpu:gloo,cuda:smddp", (False, True)), ("cpu:smddp", (True, False))],
)
def test_the_backend_string_selects_the_devices_of_smddp(backend, ours):
    from smddp._register import register

    register()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert (world._serves_cpu, world._serves_cuda) == ours
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [1.0, 1.0]
        if not ours[1]:
            with pytest.raises(RuntimeError, match="cpu:smddp,cuda:smddp"):
                world.allreduce([ones(1)])
    finally:
        dist.destroy_process_group()


def test_other_backends_receive_the_device_that_the_group_is_bound_to(monkeypatch):
    """torch passes the group's device to a backend when it is registered."""
    from smddp._register import register
    from smddp.torch.process_group import SmddpProcessGroup

    bound = {}

    def registering(self, device, kind, backend):
        bound[device.type] = self.bound_device_id
        dist.ProcessGroup._register_backend(self, device, kind, backend)

    monkeypatch.setattr(SmddpProcessGroup, "_register_backend", registering)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    register()
    own = torch.device("cuda", 0)
    dist.init_process_group("cpu:smddp,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    try:
        assert bound["cuda"] == own
    finally:
        dist.destroy_process_group()


def test_torch_cuda_is_used_in_one_module():
    # Except in the sharding layers, which use torch directly, and in one check of `observability`, which may not import
    # the backend.
    package = Path(inspect.getfile(smddp)).parent
    users = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if not {"sagemaker", "modelparallel"} & set(path.parts) and "torch.cuda." in path.read_text()
    ]
    assert sorted(users) == ["observability/info.py", "torch/cuda.py"]


def test_groups_of_cpu_tensors_never_load_it():
    import subprocess
    import sys

    code = """
import sys, torch, torch.distributed as dist
from smddp._register import register
register()
dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1)); dist.barrier(); dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
dist.destroy_process_group()
print([name for name in sys.modules if name.startswith("smddp.torch.cuda") or name == "smddp.torch.collectives.cuda"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
