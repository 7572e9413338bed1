"""Ctrl-C interrupts a waiting rank, and the group stays usable."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks


def interrupted() -> float:
    """Interrupts this rank in a call that the other has not made. Returns the seconds until the call raised."""
    tensor = torch.ones(3)
    sent = []
    calls = dist.group.WORLD._get_sequence_number_for_group

    def interrupt(begun: int) -> None:
        # Not before the call has started.
        while calls() == begun:
            time.sleep(0.01)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt, args=[calls()])
    thread.start()
    try:
        dist.all_reduce(tensor)
        raise AssertionError("the other rank has not come yet")
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()


@on_ranks(2)
def test_ctrl_c_ends_a_wait_within_half_a_second_and_the_call_continues() -> None:
    store = dist.distributed_c10d._get_default_store()
    late = []
    # the machine may delay one of them
    for step in range(3):
        if dist.get_rank() == 0:
            late.append(interrupted())
            store.set(f"interrupted {step}", "yes")
        else:
            # Not before the other rank was interrupted in its wait.
            store.wait([f"interrupted {step}"])
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0, 2.0, 2.0]
        again = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(again)
        assert again.tolist() == [1.0, 1.0]
    assert not late or min(late) < 0.5, late


class Stopped(Exception):
    """Raised by a signal handler."""


def stop(number: int, frame: object) -> None:
    raise Stopped


def leave_torch(group: Any) -> None:
    dist.destroy_process_group(group)


def leave_in_a_with(group: smddp.Communicator) -> None:
    with group:
        pass


@on_ranks(2)
def test_a_signal_while_a_group_is_left_raises_its_handlers_exception() -> None:
    store = dist.distributed_c10d._get_default_store()
    rank, handlers = dist.get_rank(), [(signal.default_int_handler, KeyboardInterrupt), (stop, Stopped)]
    ways = {"destroy": leave_torch, "close": smddp.Communicator.close, "with": leave_in_a_with}
    for number, (way, leave) in enumerate(ways.items()):
        for step, (handler, error) in enumerate(handlers):
            name = f"leaving {number} {step}"
            if way == "destroy":
                group: Any = dist.new_group([0, 1])
            else:
                group = smddp.init(rank, 2, store=dist.PrefixStore(name, store))
            if rank == 0:
                before = signal.signal(signal.SIGINT, handler)
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                try:
                    leave(group)
                    raise AssertionError(f"{name}: the other rank has not come yet")
                except error:
                    pass
                finally:
                    timer.join()
                    signal.signal(signal.SIGINT, before)
                    store.set(name, "left")
            else:
                store.wait([name])
                leave(group)
    dist.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [2.0, 2.0]


def _interrupt_once_waiting(call: Any) -> None:
    """Makes the call, which the other rank has not made, and interrupts it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


@on_ranks(2)
def test_all_parts_of_an_interrupted_coalesced_call_continue() -> None:
    world, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    counts = (4, 1000, 3)

    def options(kind: type) -> Any:
        made = kind()
        made.asyncOp = False
        return made

    def ones(scale: int = 1) -> list[torch.Tensor]:
        return [torch.ones(scale * count) for count in counts]

    reduced, gathered, scattered = ones(), [torch.zeros(2 * count) for count in counts], ones()
    listed = [[torch.zeros(count) for count in counts] for _ in range(2)]
    calls = {
        "all_reduce": (
            lambda: world.allreduce_coalesced(reduced, options(dist.distributed_c10d.AllreduceCoalescedOptions)),
            reduced,
            2,
        ),
        "all_gather_into_tensor": (
            lambda: world.all_gather_single_coalesced(
                gathered, ones(), options(dist.distributed_c10d.AllgatherOptions)
            ),
            gathered,
            1,
        ),
        "all_gather": (
            lambda: world.allgather_coalesced(listed, ones(), options(dist.distributed_c10d.AllgatherOptions)),
            [*listed[0], *listed[1]],
            1,
        ),
        "reduce_scatter": (
            lambda: world.reduce_scatter_single_coalesced(
                scattered, ones(2), options(dist.distributed_c10d.ReduceScatterOptions)
            ),
            scattered,
            2,
        ),
    }
    for name, (call, outputs, value) in calls.items():
        if dist.get_rank() == 0:
            _interrupt_once_waiting(call)
            store.set(f"left {name}", "yes")
        else:
            store.wait([f"left {name}"])
            call()
        dist.barrier()
        for output in outputs:
            assert output.unique().tolist() == [value], name


@on_ranks(2)
def test_interrupted_sparse_all_reduce_ends_the_call_of_the_other_rank() -> None:
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.eye(3).to_sparse()
    if dist.get_rank() == 0:
        _interrupt_once_waiting(lambda: dist.all_reduce(tensor, group=group))
        store.set("left sparse", "yes")
    else:
        store.wait(["left sparse"])
        with pytest.raises(smddp.Error, match="rank 0 left a sparse all_reduce before its end"):
            dist.all_reduce(tensor, group=group)
    dist.barrier()


@on_ranks(2)
def test_an_interrupt_between_two_parts_ends_the_call_of_the_other_rank() -> None:
    group = dist.new_group()
    tensors = [torch.ones(4), torch.ones(4)]
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    options.asyncOp = False
    if dist.get_rank() == 0:

        def parts() -> Iterator[Any]:
            yield group.allreduce([tensors[0]])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            group._start_parts(parts(), tensors, options)
    else:
        with pytest.raises(smddp.ClosedError, match="rank 0 left a coalesced call before its end"):
            group.allreduce_coalesced(tensors, options)
