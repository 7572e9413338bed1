"""SMDDP_AUDIT through torch: correct results pass the checks, which `smddp info` and the group's transport show."""

from __future__ import annotations

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
    """Three ranks on three nodes."""
    with Pool(3, lambda rank: {"SMDDP_NODE": f"node{rank}", "SMDDP_AUDIT": "wire,results:2"}) as made:
        yield made


cases = Cases()


def compared(group: dist.ProcessGroup) -> int:
    """Returns the number of compared results of the group, each of which costs one all_gather."""
    entries = [entry for entry in smddp.traffic() if entry["group"] == group.group_name]
    return sum(entry["operations"] for entry in entries if entry["collective"] == "all_gather")


@cases
def results_of_all_kinds_of_calls_are_compared() -> None:
    group = dist.new_group([0, 1, 2])
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (7, 5_000, 300_000):
        data = torch.full((count,), float(rank))
        dist.all_reduce(data, group=group)
        works = [dist.all_reduce(part, group=group, async_op=True) for part in data.chunk(3)]
        for work in works:
            work.wait()
        assert torch.equal(data, torch.full((count,), 3.0 * size)), data
    dist.barrier(group)
    assert compared(group) == 6, smddp.traffic()


@cases
def replicas_train() -> None:
    torch.manual_seed(dist.get_rank())
    group = dist.new_group([0, 1, 2])
    model = DistributedDataParallel(torch.nn.Linear(300, 30), process_group=group)
    for _ in range(6):
        model(torch.randn(8, 300)).square().mean().backward()
    dist.barrier(group)
    assert compared(group) >= 3, smddp.traffic()


@cases
def the_checks_are_shown() -> None:
    audit = smddp.info()["machine"]["audit"]
    assert "CRC32C of each frame" in audit and "all_reduce results in host memory, interval 2" in audit, audit
    assert any("with checksums" in path for path in smddp.paths().values()), smddp.paths()


@pytest.mark.parametrize("case", cases)
def test_between_three_nodes(nodes, case):
    nodes.run(__name__, case, 60)
