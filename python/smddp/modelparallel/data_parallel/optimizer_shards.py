"""Key ``shard_optimizer_state``: each replica of a stage steps a shard of its parameters and broadcasts the result.

All replicas hold all averaged gradients, so clipping and scaling do not change. Only optimizer states and float32
masters are sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel.replicas import buckets

if TYPE_CHECKING:
    from smddp.modelparallel.ranks import Ranks

# Maximum bytes of parameters in one broadcast.
_BUCKET = 25 << 20


class Shares:
    """Assignment of parameters to the replicas of a stage for the optimizer step.

    Attributes:
        replica, replicas: index of this replica, and number of replicas.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.replica, self.replicas, self._group = ranks.rdp_rank, ranks.rdp_size, ranks.rdp_group
        self._ranks = dist.get_process_group_ranks(ranks.rdp_group)
        self._of: list[list[torch.Tensor]] = [[] for _ in range(self.replicas)]
        self._known: set[int] = set()
        self._mine: set[int] = set()

    def divide(self, parameters: Iterable[torch.Tensor]) -> None:
        """Assign each new parameter, largest first, to the replica with the fewest elements."""
        new = {id(each): each for each in parameters if id(each) not in self._known}
        loads = [sum(each.numel() for each in own) for own in self._of]
        for parameter in sorted(new.values(), key=lambda each: -each.numel()):
            owner = loads.index(min(loads))
            self._of[owner].append(parameter)
            loads[owner] += parameter.numel()
        self._known |= new.keys()
        self._mine = {id(each) for each in self._of[self.replica]}

    def mine(self, parameter: torch.Tensor) -> bool:
        """Return True if this replica steps the parameter."""
        return id(parameter) in self._mine

    @contextlib.contextmanager
    def alone(self, groups: list[dict[str, Any]], mine: Callable[[Any], bool]) -> Iterator[None]:
        """Restrict an optimizer's groups to this replica's shard; ``mine`` selects it."""
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [each for each in group["params"] if mine(each)]
        try:
            yield
        finally:
            for group, parameters in zip(groups, whole):
                group["params"] = parameters

    @torch.no_grad()
    def spread(self) -> None:
        """Exchange the updated shards of all replicas. Collective over the replicas."""
        for owner, parameters in zip(self._ranks, self._of):
            for bucket in buckets(parameters, _BUCKET):
                flat = torch.cat([parameter.reshape(-1) for parameter in bucket])
                dist.broadcast(flat, owner, group=self._group)
                values = flat.split([parameter.numel() for parameter in bucket])
                for parameter, value in zip(bucket, values):
                    parameter.copy_(value.view_as(parameter))

    def gather(self, part: Any) -> list[Any]:
        """Return the ``part`` of every replica. Collective over the replicas."""
        found: list[Any] = [None] * self.replicas
        dist.all_gather_object(found, part, group=self._group)
        return found
