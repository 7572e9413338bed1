"""SMDDP_WIRE_FORMAT through torch: which data is compressed between nodes, and which is not."""

from __future__ import annotations

import contextlib

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import Cases
from ranks.group import BACKEND
from ranks.pool import Pool
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="the setting is smddp's")


@pytest.fixture(scope="module")
def nodes():
    """Two ranks on two nodes."""
    formats = "bf16,reduce_scatter=int8"
    with Pool(2, lambda rank: {"SMDDP_NODE": f"node{rank}", "SMDDP_WIRE_FORMAT": formats}) as made:
        yield made


cases = Cases()


@cases
def values_and_ways() -> None:
    rank, n = dist.get_rank(), 40_000
    mine = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    both = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    whole = torch.empty(2 * n)
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.cat(both).bfloat16().float())
    total = mine.clone()
    dist.all_reduce(total)
    assert torch.allclose(total, both[0] + both[1], rtol=2**-7, atol=2**-6)
    assert torch.equal(total, total.bfloat16().float())
    part = torch.empty(n // 2)
    dist.reduce_scatter_tensor(part, mine)
    expected = (both[0] + both[1])[rank * n // 2 :][: n // 2]
    assert 0 < (part - expected).abs().max() < both[1 - rank].abs().max() / 127

    ways = smddp.paths()
    assert "bf16 between nodes" in ways["all_gather"] and "bf16 between nodes" in ways["all_reduce"], ways
    assert "int8 between nodes" in ways["reduce_scatter"], ways

    with smddp.exact():
        dist.all_gather_into_tensor(whole, mine)
        summed = mine.clone()
        dist.all_reduce(summed, async_op=True).wait()
    assert torch.equal(whole, torch.cat(both)) and torch.equal(summed, both[0] + both[1])
    dist.all_gather_into_tensor(whole, mine)
    assert not torch.equal(whole, torch.cat(both))

    # Other types, small buffers and other collectives are unchanged.
    exact = mine.double()
    dist.all_reduce(exact)
    assert torch.equal(exact, both[0].double() + both[1].double())
    few = mine[:1000].clone()
    dist.all_reduce(few)
    assert torch.equal(few, (both[0] + both[1])[:1000])
    sent = mine.clone()
    dist.broadcast(sent, 1)
    assert torch.equal(sent, both[1])


@cases
def compressed_bytes_are_counted() -> None:
    rank, n = dist.get_rank(), 256 * 1024
    group = dist.new_group([0, 1])
    mine, whole, part = torch.ones(n), torch.empty(2 * n), torch.empty(n // 2)
    dist.all_gather_into_tensor(whole, mine, group=group)
    dist.reduce_scatter_tensor(part, mine, group=group)
    with smddp.exact():
        dist.all_gather_into_tensor(whole, mine, group=group)
    (dist.send if rank else dist.recv)(mine, 1 - rank, group=group)
    counted = {
        (entry["collective"], "between" in entry["algorithm"]): entry["crossed"]
        for entry in smddp.traffic()
        if entry["group"] == group.group_name and entry["operations"]
    }
    del counted["barrier", False]
    gathered = {("all_gather", True): 2 * n, ("all_gather", False): 4 * n}
    # Eight bits per element, and one scale per 256 elements.
    sums = {("reduce_scatter", True): n // 2 + n // 2 // 256 * 4}
    assert counted == gathered | sums | ({("send", False): 4 * n} if rank else {}), counted


@cases
def replicas_have_equal_values() -> None:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(least, most)


@cases
def different_settings_raise_a_mismatch() -> None:
    group = dist.new_group([0, 1])
    whole, mine = torch.empty(80_000), torch.ones(40_000)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(smddp.exact())
        with pytest.raises(smddp.MismatchError, match=r"all_gather.*as SMDDP_WIRE_FORMAT says"):
            dist.all_gather_into_tensor(whole, mine, group=group)


@pytest.mark.parametrize("case", cases)
def test_between_two_nodes(nodes, case):
    nodes.run(__name__, case, 60)
