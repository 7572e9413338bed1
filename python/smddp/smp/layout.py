"""Sizes of the mesh that the degrees of SMP v2 give for a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smddp.text import divisors


@dataclass(frozen=True)
class Layout:
    """The sizes of the mesh's dimensions; ``native`` if FSDP stays as the script makes it.

    ``context`` is a divisor of ``shard``: the ranks that hold parts of the same samples.
    """

    replicate: int
    shard: int
    tensor: int
    native: bool
    context: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def copy(self) -> int:
        """Data-parallel ranks that hold one copy of the model, experts included, of `copies`."""
        return math.lcm(self.shard, self.expert)

    @property
    def copies(self) -> int:
        return self.replicate * self.shard // self.copy

    @property
    def expert_shard(self) -> int:
        """Ranks that share each expert under FSDP."""
        return self.copy // self.expert


def layout(world: int, shard: int, tensor: int, context: int = 1, expert: int = 1) -> Layout:
    """Resolves the degrees for ``world`` ranks; ``shard`` is hybrid_shard_degree, 0 included.

    Raises:
        ValueError: a degree that does not fit, with the arithmetic and the degrees that would.
    """
    for key, degree in (
        ("tensor_parallel_degree", tensor),
        ("context_parallel_degree", context),
        ("expert_parallel_degree", expert),
    ):
        if degree > world or world % degree:
            raise ValueError(f"{key}={degree} does not divide {world} ranks; these do: {divisors(world)}")
    if shard and context > shard:
        raise ValueError(f"context_parallel_degree={context} must not exceed hybrid_shard_degree={shard}")
    data = world // tensor
    if data % expert:
        raise ValueError(
            f"expert_parallel_degree={expert} does not fit: {world} ranks / tensor_parallel_degree={tensor} = {data}, "
            f"which is not a multiple of {expert}; these would: {divisors(data)}"
        )
    if shard and (shard > data or data % shard):
        if tensor == 1:
            sum_ = f"{world} ranks are not a multiple of {shard}"
        else:
            sum_ = f"{world} ranks / tensor_parallel_degree={tensor} = {data}, which is not a multiple of {shard}"
        raise ValueError(f"hybrid_shard_degree={shard} does not fit: {sum_}; these would: 0, {divisors(data)}")
    native = shard == 0 and tensor == 1 and expert == 1
    size = shard or data
    if size % context:
        raise ValueError(
            f"context_parallel_degree={context} does not divide a sharding group of {size} ranks "
            f"(hybrid_shard_degree={shard}, tensor_parallel_degree={tensor}); these do: {divisors(size)}"
        )
    return Layout(data // size, size, tensor, native, context, expert)
