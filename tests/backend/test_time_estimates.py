"""torch's time estimates: the cost model answers, and no data is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from smddp.torch.device_map import SmddpDevice


def estimator() -> Any:
    """Returns torch's estimator; skips if torch has none or does not support Python backends."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if not hasattr(dist, "_time_estimator") or not isinstance(backend, SmddpDevice):
        pytest.skip("this torch asks no such backend for estimates")
    return dist._time_estimator


def ways(count: int) -> dict[str, tuple[list[torch.Tensor], Callable[..., Any]]]:
    """Returns calls of at least `count` elements with their outputs; they differ between ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    one, all_of = torch.full((count,), 7.0), torch.full((count * size,), 7.0)
    parts = list(torch.full((size, count), 7.0))
    strided = torch.full((count, 2), 7.0)[:, 0]
    peer = (rank + 1) % size
    return {
        "all_reduce": ([one], lambda: dist.all_reduce(one)),
        "of a strided tensor": ([strided], lambda: dist.all_reduce(strided)),
        "with a handle": ([one], lambda: dist.all_reduce(one, async_op=True).wait()),
        "broadcast": ([one], lambda: dist.broadcast(one, src=size - 1)),
        "reduce": ([one], lambda: dist.reduce(one, dst=0)),
        "all_gather": (parts, lambda: dist.all_gather(parts, torch.zeros(count))),
        "all_gather_into_tensor": ([all_of], lambda: dist.all_gather_into_tensor(all_of, torch.zeros(count))),
        "reduce_scatter_tensor": ([one], lambda: dist.reduce_scatter_tensor(one, torch.zeros(count * size))),
        "all_to_all_single": ([all_of], lambda: dist.all_to_all_single(all_of, torch.zeros(count * size))),
        "send": ([], lambda: dist.send(torch.zeros(count), peer)),
        "recv": ([one], lambda: dist.recv(one, peer)),
    }


@on_ranks(2, 3)
def test_estimates_are_positive_grow_with_bytes_and_send_no_data():
    estimate = estimator()
    # One rank makes the call: it waits for no other.
    if dist.get_rank() == 0:
        for (name, (_, small)), (outputs, large) in zip(ways(64).items(), ways(1 << 20).values()):
            times = []
            for call in (small, large, lambda large=large: [large(), large()]):
                with estimate() as found:
                    call()
                times.append(found.estimated_time)
            assert 0 < times[0] < times[1] < 10e6 and times[2] == pytest.approx(2 * times[1]), f"{name}: {times}"
            assert all(output.eq(7).all() for output in outputs), name
        with estimate() as found:
            pass
        assert found.estimated_time == 0
        with estimate() as found:
            dist.barrier()
        assert 0 < found.estimated_time < 1e6
    summed = torch.ones(5)
    dist.all_reduce(summed)
    assert summed.eq(dist.get_world_size()).all()


@on_ranks(2)
def test_a_call_that_raises_ends_the_estimate():
    estimate = estimator()
    with pytest.raises(ValueError, match="invalid root"), estimate():
        dist.distributed_c10d._get_default_group().broadcast([torch.ones(2)], 9)
    with pytest.raises(NotImplementedError, match="sparse all_reduce"), estimate():
        dist.all_reduce(torch.ones(2).to_sparse())
    summed = torch.ones(5)
    dist.all_reduce(summed)
    assert summed.eq(2).all()
