"""Parallelism degrees, and the device mesh and process groups derived from them.

The world is one mesh of three dimensions, `replicate` x `shard` x `tensor`, with the tensor dimension innermost:
the ranks of a tensor group are adjacent, then those of a shard group, then the copies of the model. Ranks are ordered
by node first, so a shard group that fits into a node remains inside it (but see `arranged`). A context group consists
of adjacent ranks of the shard dimension. They shard parameters and average gradients like other ranks of the shard
group, but hold parts of the same samples.

Experts use a separate mesh over the same ranks, `expert_replicate` x `expert_shard` x `expert` x `tensor`. An expert
group consists of adjacent ranks. One copy of all experts occupies as many ranks as one copy of the other parameters,
or the least multiple that the expert groups fill.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smddp.sagemaker import private_names
from smddp.smp.layout import Layout, layout
from smddp.torch.bootstrap import subgroup

__all__ = ["Layout", "layout"]

DIMENSIONS = ("replicate", "shard", "tensor")
EXPERT_DIMENSIONS = ("expert_replicate", "expert_shard", "expert", "tensor")


def order_by_node(nodes: list[str]) -> list[int]:
    """Returns all ranks grouped by node, nodes in the order of their first rank. ``nodes[r]``: rank r's node."""
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    return sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))


def arranged(sizes: Layout, nodes: list[str]) -> torch.Tensor:
    """Returns the ranks as (replicate, shard, tensor), ordered by node if possible, else by number.

    torch numbers the ranks of a group in ascending order, and a DTensor's parts by their place in the mesh: only where
    these agree does a part have the offset that its values have.
    """
    ranks = torch.tensor(order_by_node(nodes)).view(sizes.replicate, sizes.shard, sizes.tensor)
    of_experts = ranks.view(-1, sizes.expert_shard, sizes.expert, sizes.tensor)
    ascending = [bool((mesh.diff(dim=dim) > 0).all()) for mesh in (ranks, of_experts) for dim in range(mesh.dim())]
    return ranks if all(ascending) else torch.arange(sizes.world).view(ranks.shape)


def even_nodes(group: list[int], nodes: list[str]) -> list[list[int]] | None:
    """The ranks of an ascending ``group``, node by node; ``nodes[r]``: rank r's node.

    None if its nodes hold different numbers of them, or take turns.
    """
    runs = [list(run) for _, run in itertools.groupby(group, lambda rank: nodes[rank])]
    whole = len(runs) == len({nodes[rank] for rank in group})
    return runs if whole and len({len(run) for run in runs}) == 1 else None


@dataclass(frozen=True)
class Hierarchy:
    """This rank's groups within and between nodes, for expert groups with several ranks on each of several nodes.

    Attributes:
        between: the ranks in this one's place on each node, in the order of the nodes.
        within: the ranks on this node.
    """

    between: dist.ProcessGroup
    within: dist.ProcessGroup


def device_type() -> str:
    """Returns the mesh's device type: "cuda" if the default group can use a GPU, else "cpu"."""
    if torch.cuda.is_available():
        try:
            _world()._get_backend(torch.device("cuda"))
            return "cuda"
        except RuntimeError:
            pass
    return "cpu"


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # `init` has made it before any mesh
    return world


def forget_old_meshes() -> None:
    """Clear DTensor's caches that are keyed by mesh.

    A new mesh equals the mesh of an earlier `init` of this process. DTensor would reuse the old mesh, whose groups may
    be destroyed.
    """
    private_names.clear_dtensor_caches()


class ParallelState:
    """The mesh of this process and the groups made from it, each made once.

    Attributes:
        mesh: DeviceMesh (replicate, shard, tensor).
        expert_mesh: DeviceMesh (expert_replicate, expert_shard, expert, tensor); None without expert parallelism.
        one_copy: process group of the ranks that hold one copy of the model together (copy x tensor).
        hierarchy: node placement of this process's expert group; None without hierarchical dispatch, see `Hierarchy`.
        uneven: expert groups that span nodes and have different numbers of ranks on them.
        context: process group of the ranks that hold parts of the same samples; None without context parallelism.
        place: this rank's index in each dimension, by name.
    """

    def __init__(self, sizes: Layout, nodes: list[str]) -> None:
        self.sizes = sizes
        forget_old_meshes()
        self.ranks = arranged(sizes, nodes)
        self.mesh = DeviceMesh(device_type(), self.ranks, mesh_dim_names=DIMENSIONS)
        self.expert_mesh: DeviceMesh | None = None
        self.hierarchy: Hierarchy | None = None
        self.uneven: list[list[int]] = []
        if sizes.expert > 1:
            ranks = self.ranks.view(-1, sizes.expert_shard, sizes.expert, sizes.tensor)
            self.expert_mesh = DeviceMesh(device_type(), ranks, mesh_dim_names=EXPERT_DIMENSIONS)
            self._lay_experts_on(nodes, ranks.transpose(2, 3).reshape(-1, sizes.expert).tolist())
        if sizes.tensor == 1 and sizes.copy == sizes.shard:
            self.one_copy = self.group("shard")
        else:
            self.one_copy = subgroup(self.ranks.view(sizes.copies, -1).tolist())
        self.context = None if sizes.context == 1 else subgroup(self._context_groups())
        place = (self.ranks == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(DIMENSIONS, place))

    def group(self, dimension: str) -> dist.ProcessGroup:
        """This rank's group along one dimension of the mesh."""
        return self.mesh.get_group(dimension)

    def _lay_experts_on(self, nodes: list[str], groups: list[list[int]]) -> None:
        """Make `hierarchy`, from the ranks of all expert ``groups``."""
        within, between = [], []
        for group in map(sorted, groups):
            on = even_nodes(group, nodes)
            if on is None:
                self.uneven.append(group)
            elif 1 < len(on) < len(group):
                within += on
                between += [list(rail) for rail in zip(*on)]
        if within:
            local, _ = dist.new_subgroups_by_enumeration(within)
            remote, _ = dist.new_subgroups_by_enumeration(between)
            if isinstance(local, dist.ProcessGroup) and isinstance(remote, dist.ProcessGroup):
                self.hierarchy = Hierarchy(remote, local)

    def _context_groups(self) -> list[list[int]]:
        """Returns the ranks of every context group: adjacent ranks of the shard dimension."""
        sizes = self.sizes
        split = self.ranks.view(sizes.replicate, sizes.shard // sizes.context, sizes.context, sizes.tensor)
        return split.transpose(2, 3).reshape(-1, sizes.context).tolist()

    @property
    def data_rank(self) -> int:
        """This rank's place among those of its tensor rank, copy after copy: context ranks are counted one by one."""
        return self.place["replicate"] * self.sizes.shard + self.place["shard"]

    def replication_groups(self) -> list[list[int]]:
        """Returns the ranks that hold each shard, in order of their copy."""
        return self.ranks.reshape(self.sizes.copies, -1).T.tolist()

    def nodes_of_shard_group(self, nodes: list[str]) -> int:
        """Returns the number of nodes that this rank's shard group spans."""
        return len({nodes[rank] for rank in dist.get_process_group_ranks(self.group("shard"))})
