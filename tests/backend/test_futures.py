"""Handles and futures, also with a waiter in C++ (the DDP reducer)."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from backend.oracle import same


@on_ranks(2)
def test_a_future_holds_the_outputs():
    world = dist.group.WORLD
    tensor = torch.ones(3)
    future = world.allreduce([tensor]).get_future()
    same(future.wait()[0], torch.full((3,), 2.0))
    assert future.done()
    assert future.value()[0] is tensor or torch.equal(future.value()[0], tensor)
    outputs = [torch.empty(1), torch.empty(1)]
    value = dist.all_gather(outputs, torch.tensor([float(dist.get_rank())]), async_op=True).get_future().wait()
    assert [float(v) for v in value] == [0.0, 1.0]
    same(world.allreduce_coalesced([torch.ones(1), torch.ones(2)]).get_future().wait()[1], torch.full((2,), 2.0))


@on_ranks(2)
def test_futures_chain():
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] * 10).then(lambda f: f.value() + 1)
    same(chained.wait(), torch.full((2,), 21.0))


@on_ranks(2)
def test_a_callback_may_call_and_wait_for_another_collective():
    def again(future):
        tensor = future.value()[0].clone()
        inner = dist.all_reduce(tensor, async_op=True).get_future().wait()[0]
        dist.all_reduce(inner)
        return inner

    same(dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).wait(), torch.full((2,), 8.0))


@on_ranks(2)
def test_a_completed_call_returns_a_future():
    work = dist.all_reduce(tensor := torch.ones(2), async_op=True)
    work.wait()
    same(work.get_future().wait()[0], tensor)
    same(work.result()[0], tensor)
    work.synchronize()


@on_ranks(2)
def test_handles_may_be_dropped_without_a_wait():
    for _ in range(50):
        dist.all_reduce(torch.ones(100), async_op=True)
    dist.barrier()


@on_ranks(2)
def test_many_calls_may_be_pending():
    tensors = [torch.full((17,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.full((17,), 2.0 * i))


def losses(hook=None, steps: int = 3) -> list[float]:
    """Trains a small model on this rank's half of the data; the hook reduces the gradients."""
    torch.manual_seed(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        mine = data.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(mine).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), dist.ReduceOp.AVG)
        found.append(float(total))
    return found


def alone(steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        loss = model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


@on_ranks(2)
def test_ddp_equals_one_process_with_every_kind_of_hook():
    wanted = alone()

    def then_hook(state, bucket):
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])

    hooks = {
        "none": None,
        "allreduce": lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook),
        "then": lambda m: m.register_comm_hook(None, then_hook),
        "builtin": lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    }
    for name, hook in hooks.items():
        assert losses(hook) == pytest.approx(wanted, abs=1e-6), name
    assert losses(lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)) == pytest.approx(
        wanted, rel=1e-2
    )
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    assert len(losses(lambda m: m.register_comm_hook(state, powerSGD_hook.powerSGD_hook), steps=4)) == 4


@on_ranks(2)
def test_ddp_trains_on_a_secondary_thread():
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(losses()))
    thread.start()
    thread.join()
    assert found[0] == pytest.approx(alone(), abs=1e-6)


@on_ranks(2)
def test_an_error_reaches_waits_futures_and_the_ddp_reducer():
    """The group is aborted, so every call fails; C++ must raise, not crash."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    loss = model(torch.ones(2, 4)).sum()
    dist.barrier()
    group.abort()
    with pytest.raises(RuntimeError):
        loss.backward()
    with pytest.raises(RuntimeError):
        group.allreduce([torch.ones(1)]).wait()
    dist.barrier()


@on_ranks(2)
def test_the_future_of_a_call_that_fails_later_raises():
    group = dist.new_group([0, 1])
    dist.barrier()
    if dist.get_rank() == 0:
        work = group.recv([torch.empty(1)], 1, 0)
        future = work.get_future()
        group.abort()
        with pytest.raises(RuntimeError):
            work.wait()
        with pytest.raises(RuntimeError):
            future.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
    dist.barrier()


@on_ranks(2)
def test_a_wait_that_times_out_names_its_call():
    limit = datetime.timedelta(seconds=0.2)
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"wait for all_reduce .*Timed out") as caught:
            (reduction := dist.all_reduce(torch.ones(1), group=group, async_op=True)).wait(limit)
        assert "the call goes on" in str(caught.value)
        receive = dist.irecv(tensor := torch.empty(1), 1, tag=3)
        with pytest.raises(RuntimeError, match="wait for recv from rank 1 "):
            receive.wait(limit)
        dist.barrier()
        reduction.wait()
        receive.wait()
        assert tensor.item() == 4.0
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=group)
        dist.send(torch.tensor([4.0]), 0, tag=3)
