"""`smddp.bind`: a collective that is checked once and called repeatedly."""

from __future__ import annotations

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND

from backend.oracle import same

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="only smddp's groups have bound calls")


def _full(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(value))


@on_ranks(2, 3)
def test_a_bound_call_equals_the_call_on_the_tensors_current_values():
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, gathered, mine = _full(0), torch.empty(3 * size), _full(0)
    listed = [_full(0) for _ in range(size)]
    scattered, parts, exchanged = _full(0), torch.empty(3 * size), torch.empty(3 * size)
    calls = {
        "all_reduce": smddp.bind(dist.all_reduce, reduced, op=dist.ReduceOp.AVG),
        "all_gather_into_tensor": smddp.bind(dist.all_gather_into_tensor, gathered, mine),
        "all_gather": smddp.bind(dist.all_gather, listed, mine),
        "reduce_scatter_tensor": smddp.bind(dist.reduce_scatter_tensor, scattered, parts),
        "all_to_all_single": smddp.bind(dist.all_to_all_single, exchanged, parts),
        "broadcast": smddp.bind(dist.broadcast, mine, src=size - 1),
        "barrier": smddp.bind(dist.barrier),
    }
    for step in range(3):
        for begin in (lambda call: call(), lambda call: (call.start(), call.wait())):
            reduced.fill_(rank + step)
            begin(calls["all_reduce"])
            same(reduced, _full((size - 1) / 2 + step))
            mine.fill_(rank + 10 * step)
            begin(calls["all_gather_into_tensor"])
            begin(calls["all_gather"])
            wanted = torch.arange(size).repeat_interleave(3) + 10.0 * step
            same(gathered, wanted)
            same(torch.cat(listed), wanted)
            parts.copy_(torch.arange(3.0 * size) + step + rank)
            begin(calls["reduce_scatter_tensor"])
            same(scattered, size * (torch.arange(3.0) + 3 * rank + step) + sum(range(size)))
            begin(calls["all_to_all_single"])
            own = torch.arange(3.0) + 3 * rank + step
            same(exchanged, torch.cat([own + peer for peer in range(size)]))
            begin(calls["broadcast"])
            same(mine, _full(size - 1 + 10 * step))
            begin(calls["barrier"])


@on_ranks(3)
def test_a_bound_call_matches_an_unbound_one_also_in_a_subgroup():
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    large = _full(rank, 100_000)
    if rank == 0:
        bound = smddp.bind(dist.all_reduce, large)
        bound()
    else:
        dist.all_reduce(large)
    same(large, _full(3, 100_000))
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            smddp.bind(dist.broadcast, large, 0, group)
        return
    here = _full(rank)
    bound = smddp.bind(dist.reduce, here, 2, dist.ReduceOp.MAX, group)
    bound()
    assert rank != 2 or here.tolist() == [2.0] * 3
    dist.destroy_process_group(group)
    with pytest.raises(smddp.ClosedError) as caught:
        bound()
    assert isinstance(caught.value, dist.DistBackendError), "as the call itself raises it"


@on_ranks(2)
def test_binding_sends_no_data_and_invalid_calls_are_refused():
    tensor = _full(dist.get_rank())
    bound = smddp.bind(dist.all_reduce, tensor)
    same(tensor, _full(dist.get_rank()))
    for wrong, error, words in [
        (lambda: smddp.bind(dist.all_reduce, tensor, async_op=True), ValueError, "start"),
        (lambda: smddp.bind(dist.send, tensor, 0), TypeError, "all_reduce"),
        (lambda: smddp.bind(print, tensor), TypeError, "all_reduce"),
        (lambda: smddp.bind(dist.all_reduce), TypeError, "tensor"),
        (lambda: smddp.bind(dist.all_reduce, torch.ones(2, 3).T), ValueError, "contiguous"),
        (lambda: smddp.bind(dist.all_reduce, torch.ones(3, device="meta")), ValueError, "CPU"),
        (lambda: smddp.bind(dist.all_gather_into_tensor, tensor, tensor), ValueError, "all_gather"),
        (lambda: smddp.bind(dist.broadcast, tensor, 7), ValueError, "7"),
    ]:
        with pytest.raises(error, match=words):
            wrong()
    with pytest.raises(RuntimeError, match="start"):
        bound.wait()
    assert bound.is_done()
    # The group is still usable.
    dist.all_reduce(tensor)
    same(tensor, _full(1))
    bound()
    same(tensor, _full(2))


@on_ranks(2)
def test_a_pending_call_cannot_be_started_again_and_freed_memory_is_not_accessed():
    rank = dist.get_rank()
    large, small = _full(rank, 1 << 20), _full(rank)
    bound = smddp.bind(dist.all_reduce, large)
    bound.start()
    with pytest.raises(RuntimeError, match="wait"):
        bound.start()
    bound.wait()
    same(large, _full(1, 1 << 20))
    again = smddp.bind(dist.all_reduce, small)
    small.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="bind it anew"):
        again()
    large.set_(torch.ones(5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="bind it anew"):
            bound.start()


@on_ranks(2)
def test_a_mismatched_call_is_reported_on_both_ranks():
    group = dist.new_group()
    tensor = _full(1)
    bound = smddp.bind(dist.all_reduce, tensor, group=group)
    with pytest.raises(smddp.MismatchError, match="broadcast") as caught:
        bound() if dist.get_rank() == 0 else dist.broadcast(tensor, 0, group)
    assert "all_reduce" in str(caught.value)


@on_ranks(2)
def test_a_call_on_a_tensor_that_changed_after_bind_raises_and_writes_nothing():
    def shrunk_storage(tensor):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(tensor.nbytes // 2)

    def shrunk(tensor):
        tensor.untyped_storage().resize_(0)
        tensor.resize_(25, 500)

    changes = [
        shrunk_storage,
        shrunk,
        lambda tensor: tensor.resize_(10),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.set_(tensor.untyped_storage(), 4, (20, 1000), (1000, 1)),
    ]
    for position in range(2):
        for number, change in enumerate(changes):
            # An allocator returns the same address for smaller memory in some iterations.
            for _ in range(5):
                tensors = [torch.ones(50, 1000), torch.ones(25, 1000)]
                bound = smddp.bind(dist.reduce_scatter_tensor, tensors[1], tensors[0])
                change(tensors[position])
                with pytest.raises(RuntimeError, match="bind it anew"):
                    bound()
                with pytest.raises(RuntimeError, match="bind it anew"):
                    bound.start()
                assert bound.is_done(), number
    dist.barrier()
