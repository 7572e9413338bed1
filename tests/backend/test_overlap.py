"""Input and output that are the same memory, or overlap.

crates/smddp-core/tests/promises/overlap.rs has all forms of the core's calls.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND
from smddp import _core

from backend.oracle import same

# Elements of a block: a short message, and a zero-copy message between nodes (from 256 KiB).
SIZES = (7, 40_001)
only_smddp = pytest.mark.skipif(BACKEND != "smddp", reason="other backends make no promise about overlapping outputs")


def _row(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 10**9 * rank


@only_smddp
@on_ranks(2, 3)
def test_overlapping_input_and_output_give_the_results_of_separate_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        whole = torch.cat([_row(r, count) for r in range(size)])
        mine = _row(rank, size * count)
        rows = torch.cat([_row(r, size * count)[rank * count :][:count] for r in range(size)])
        total = sum(_row(r, size * count) for r in range(size))[rank * count :][:count]
        following = (rank + 1) % size

        x = mine.clone()
        dist.all_to_all_single(x, x)
        same(x, rows)
        parts = list(mine.clone().chunk(size))
        dist.all_to_all(parts[1:] + parts[:1], parts)
        same(torch.cat(parts[1:] + parts[:1]), rows)

        for first in (rank * count, following * count, count // 2):
            output = torch.zeros(size * count, dtype=torch.int64)
            block = output[first : first + count]
            block += _row(rank, count)
            dist.all_gather_into_tensor(output, block)
            same(output, whole)
            x = mine.clone()
            block = x[first : first + count]
            dist.reduce_scatter_tensor(block, x)
            same(block, total)

        outputs = [torch.zeros(count, dtype=torch.int64) for _ in range(size)]
        outputs[following] += _row(rank, count)
        dist.all_gather(outputs, outputs[following])
        same(torch.cat(outputs), whole)
        inputs = list(mine.clone().chunk(size))
        dist.reduce_scatter(inputs[following], inputs)
        same(inputs[following], total)
        inputs = list(mine.clone().chunk(size))
        block = inputs[1] if rank == 0 else torch.zeros(count, dtype=torch.int64)
        dist.scatter(block, inputs if rank == 0 else None, src=0)
        same(block, _row(0, size * count)[rank * count :][:count])
        outputs = [torch.zeros(count, dtype=torch.int64) for _ in range(size)]
        block = outputs[0].copy_(_row(rank, count))
        dist.gather(block, outputs if rank == 1 else None, dst=1)
        same(torch.cat(outputs) if rank == 1 else block, whole if rank == 1 else _row(rank, count))

        x = mine.clone().numpy()
        arrays = _core.Arrays(dist.group.WORLD.communicator)
        arrays.all_to_all(x, out=x)
        assert np.array_equal(x, rows.numpy())
        x = torch.cat([_row(rank, count), torch.zeros(3, dtype=torch.int64)]).numpy()
        arrays.all_reduce(x[:-3], "max", out=x[3:])
        assert np.array_equal(x[3:], _row(size - 1, count).numpy())


@only_smddp
@on_ranks(2)
def test_overlapping_outputs_are_refused_before_any_transfer():
    x, one = torch.zeros(6), torch.ones(2)
    grid = torch.zeros(2, 2)
    world = dist.group.WORLD
    for outputs in ([one, one], [x[0:2], x[1:3]], [grid[:, 0], grid[:, 0]], [grid[:, 1], grid.view(4)[1:3]]):
        with pytest.raises(ValueError, match=r"0 and .*1.* overlap"):
            dist.all_gather(outputs, torch.ones(2))
    with pytest.raises(ValueError, match="output 0 and output 1 overlap"):
        world.allreduce_coalesced([x[:3], x[2:]])
    with pytest.raises(ValueError, match="output 0 and output 1 overlap"):
        world.allgather_into_tensor_coalesced([x[:4], x[2:]], [one, one])
    with pytest.raises(ValueError, match="input 1 and output 0 overlap"):
        world.reduce_scatter_tensor_coalesced([x[:2], torch.zeros(2)], [torch.ones(4), x[:4]])
    with pytest.raises(ValueError, match="output 0 of rank 0 and output 1 of rank 1 overlap"):
        world.allgather_coalesced([[x[0:2], x[2:4]], [x[4:6], x[0:2]]], [one, one])
    # Adjacent outputs, and inputs in place of their outputs.
    dist.all_gather([grid[:, 0], grid[:, 1]], one)
    rank = dist.get_rank()
    outputs = [torch.full((4,), float(rank)), torch.full((4,), float(rank))]
    world.allgather_into_tensor_coalesced(outputs, [output[2 * rank :][:2] for output in outputs]).wait()
    for output in outputs:
        same(output, torch.tensor([0.0, 0.0, 1.0, 1.0]))
