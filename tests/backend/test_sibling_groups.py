"""Groups of one mesh dimension reduce equal inputs to equal bits for any distribution over nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import Cases
from ranks.group import BACKEND
from ranks.pool import Pool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="nodes and orders are smddp's")

NODES = "000111"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Pool]:
    with Pool(len(NODES), lambda rank: {"SMDDP_NODE": f"node{NODES[rank]}"}) as made:
        yield made


def _is_canonical(group: dist.ProcessGroup) -> bool:
    paths = {found["name"]: found["paths"] for found in smddp.info()["groups"]}
    return "in canonical order" in paths[group.group_name]["all_reduce"]["64 MiB"]


def _result(group: dist.ProcessGroup, dtype: torch.dtype) -> list[str]:
    """Returns the hashes of all ranks' sums; inputs are equal for equal ranks in a group."""
    generator = torch.Generator().manual_seed(group.rank())
    tensor = torch.randn(100_003, generator=generator).to(dtype)
    dist.all_reduce(tensor, group=group)
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    return found


cases = Cases()


@cases
def siblings_have_the_same_bits() -> None:
    rank = dist.get_rank()
    ranks_of = {
        # Groups of three are distributed over the nodes as 2 + 1 and 1 + 2.
        "columns": (init_device_mesh("cpu", (3, 2), mesh_dim_names=("ddp", "fsdp"))["ddp"], True),
        "rows": (init_device_mesh("cpu", (2, 3), mesh_dim_names=("ddp", "tp"))["tp"], False),
        # Not the groups of any mesh in rank order.
        "permuted": (DeviceMesh("cpu", [[0, 1, 3], [2, 4, 5]], mesh_dim_names=("a", "b"))["b"], True),
        "permuted, alike": (DeviceMesh("cpu", [[0, 2, 1], [5, 3, 4]], mesh_dim_names=("a", "b"))["b"], False),
    }
    groups = {name: (mesh.get_group(), differ) for name, (mesh, differ) in ranks_of.items()}
    by_hand = [dist.new_group(list(range(first, 6, 2))) for first in (0, 1)]
    groups["by hand"] = (by_hand[rank % 2], True)
    for name, (group, differ) in groups.items():
        assert _is_canonical(group) == differ, name
        for dtype in (torch.float32, torch.bfloat16):
            assert len(set(_result(group, dtype))) == 1, name


@cases
def replicas_of_a_dtensor_are_equal() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (3, 2))
    local = torch.randn(100_003, generator=torch.Generator().manual_seed(dist.get_rank()))
    summed = DTensor.from_local(local, mesh, [Partial(), Partial()]).redistribute(mesh, [Replicate(), Replicate()])
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(summed.to_local().numpy().tobytes()).hexdigest())
    assert len(set(found)) == 1


@pytest.mark.parametrize("case", cases)
def test_sibling_groups(nodes: Pool, case: str) -> None:
    nodes.run(__name__, case, 60.0)
