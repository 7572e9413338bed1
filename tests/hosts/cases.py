"""Cases for ranks in several hosts alone; as in tests/backend, every rank runs them."""

import os
import subprocess
import sys
import threading
import time
from typing import Any

import smddp
import torch
import torch.distributed as dist
from backend.oracle import same
from ranks.cases import on_ranks


@on_ranks(4)
def half_precision_sums_round_once_a_level():
    """256 + 1 is 256 in bfloat16. Ranks of one node are added up first, and rounded; then the nodes' sums are.

    Where a node adds the others' sums to its own ranks' in one pass, that is one rounding less.
    """
    nodes = dist.group.WORLD.communicator.nodes()
    value = 256.0 if dist.get_rank() == 0 else 1.0
    sums: dict[int, float] = {}
    for rank, node in enumerate(nodes):
        sums[node] = sums.get(node, 0.0) + (256.0 if rank == 0 else 1.0)
    inside = [torch.tensor(total).bfloat16().float() for total in sums.values()]
    wanted = float(sum(inside))
    once = torch.tensor(sum(sums.values())).bfloat16()
    for count in (9, 100_000):
        tensor = torch.full((count,), value, dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        assert ((tensor == wanted) | (tensor == once)).all(), tensor
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        for other in others:
            same(other, tensor)


@on_ranks(4)
def nodes_are_the_hosts():
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.uname().nodename)
    nodes = dist.group.WORLD.communicator.nodes()
    assert [hosts.index(host) for host in hosts] == [nodes.index(node) for node in nodes], (hosts, nodes)
    ways = " ".join(smddp.paths().values())
    wanted = "fabric tcp;ofi_rxm" if os.environ.get("SMDDP_TRANSPORT", "").startswith("fabric") else "tcp eth0 10.77.0."
    assert wanted in ways and "eth0" in ways, ways
    assert ("shm + " in ways) == (len(set(nodes)) < len(nodes)), ways


def read_batch(store: Any, ranks: int) -> None:
    """Waits until `ranks` ranks have named this rank."""
    end = time.monotonic() + 50
    while store.add("status named it", 0) < ranks:
        assert time.monotonic() < end, "smddp status does not name this rank"
        time.sleep(0.02)


@on_ranks(4)
def status_names_the_late_rank_from_each_host():
    store, rank, late = dist.distributed_c10d._get_default_store(), dist.get_rank(), 3
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (os.uname().nodename, os.getpid()))
    expected = "for rank {} (host {}, pid {}), which is in read_batch at {}:".format(late, *places[late], __file__)
    texts: list[str] = []

    def query() -> None:
        end = time.monotonic() + 40
        while not any(expected in text for text in texts) and time.monotonic() < end:
            command = [sys.executable, "-m", "smddp", "status", "--threshold", "0.5"]
            texts[:] = [subprocess.run(command, capture_output=True, text=True, timeout=30).stdout]
        store.add("status named it", 1)

    if rank == late:
        read_batch(store, len(places) - 1)
        dist.all_reduce(torch.ones(2))
        return
    thread = threading.Thread(target=query)
    thread.start()
    dist.all_reduce(torch.ones(2))
    thread.join()
    assert expected in texts[0], texts
    for host, pid in places:
        assert f"{host}" in texts[0] and f" {pid} " in texts[0], texts
