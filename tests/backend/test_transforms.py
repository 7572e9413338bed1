"""Collectives inside torch.func transforms and on wrapper subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from torch._C import _distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from backend import calls, messages

needs_dispatcher = pytest.mark.skipif(
    not hasattr(c10d.ProcessGroup, "register_pre_hook"), reason="this torch does not dispatch calls of a Python group"
)


def every_call() -> list[calls.Call]:
    peer = [messages.sends(4), messages.receives(4)]
    return [
        calls.all_reduce(4),
        calls.all_reduce(4, form="shaped"),
        calls.all_reduce(4, op="MAX"),
        calls.reduce(4, root=1),
        calls.broadcast(4),
        calls.broadcast(4, form="strided"),
        calls.all_gather([4, 4], form="tensor"),
        calls.reduce_scatter([4, 4], form="tensor"),
        calls.all_to_all([4, 4], form="even"),
        calls.all_to_all([4, 4], form="uneven"),
        calls.coalesced([4, 4]),
        peer[dist.get_rank()],
        messages.both(4),
    ]


def with_lists() -> list[calls.Call]:
    """Calls whose lists of lists of tensors torch's dispatcher does not unwrap."""
    return [calls.gather(4), calls.scatter(4), calls.all_gather([4, 4]), calls.reduce_scatter([4, 4])]


def inside_grad(run: Callable[[], None]) -> None:
    def function(point: torch.Tensor) -> torch.Tensor:
        run()
        return point.sum()

    torch.func.grad(function)(torch.ones(1))


def inside_jvp(run: Callable[[], None]) -> None:
    torch.func.jvp(lambda point: (run(), point)[1], (torch.ones(1),), (torch.ones(1),))


def inside_functionalize(run: Callable[[], None]) -> None:
    torch.func.functionalize(lambda point: (run(), point)[1])(torch.ones(1))


class Twice(TorchFunctionMode):
    """Makes every new tensor a TwoTensor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in (torch.full, torch.empty):
            return TwoTensor(made, made.clone())
        return made


def with_wrappers(run: Callable[[], None]) -> None:
    with Twice():
        run()


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.a, tensor.b] if isinstance(tensor, TwoTensor) else [tensor]


@needs_dispatcher
@on_ranks(2)
def test_every_call_works_inside_transforms_and_on_wrapper_subclasses():
    group = dist.group.WORLD
    wrong: list[str] = []
    for surrounding in (inside_grad, inside_jvp, inside_functionalize, with_wrappers):
        for call in every_call() + (with_lists() if surrounding is with_wrappers else []):
            for later in (False, True):

                def run(call: calls.Call = call, later: bool = later) -> None:
                    work, found, right = call.begin(group, later)
                    if later and work is not None:
                        work.wait()
                    for tensor, wanted in zip(found, right, strict=True):
                        pairs = zip(parts(tensor), parts(wanted), strict=True)
                        assert all(torch.equal(one, other) for one, other in pairs), (tensor, wanted)

                try:
                    surrounding(run)
                except Exception as error:
                    wrong.append(f"{surrounding.__name__}, {call}, later={later}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong[:9])


@needs_dispatcher
@on_ranks(2)
def test_lists_inside_a_transform_are_refused_before_any_transfer():
    for surrounding in (inside_grad, inside_jvp):
        for call in (calls.all_gather([4, 4]), calls.reduce_scatter([4, 4])):
            with pytest.raises(ValueError, match="all_gather_into_tensor"):
                surrounding(lambda call=call: call.make(dist.group.WORLD, False))
    dist.all_reduce(after := torch.ones(2))
    assert after.tolist() == [2.0, 2.0]


@needs_dispatcher
@on_ranks(2)
def test_gradients_of_a_collective_equal_those_with_gloo():
    def summed(point: torch.Tensor) -> torch.Tensor:
        doubled = point * 2
        dist.all_reduce(doubled)
        return (doubled * doubled).sum()

    one = torch.ones(3)
    assert torch.func.grad(summed)(one).tolist() == [16.0] * 3
    assert float(torch.func.jvp(summed, (one,), (one,))[1]) == 48.0


@on_ranks(2)
def test_a_tensor_without_memory_is_still_refused():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        dist.all_reduce(tensor)
    dist.all_reduce(after := torch.ones(2))
    assert after.tolist() == [2.0, 2.0]
