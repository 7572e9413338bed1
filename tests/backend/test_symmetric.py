"""Symmetric memory that the ranks of a host read in place: `smddp.empty`, and torch's interfaces to it."""

from __future__ import annotations

import gc
import os

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND
from smddp.torch.device_map import SmddpDevice
from torch.distributed.fsdp import fully_shard

from backend.oracle import same

# Another backend of SMDDP_TEST_BACKEND can use the memory, but copies its messages.
reads_in_place = pytest.mark.skipif(BACKEND != "smddp", reason="only smddp reads messages in place")


def _read_in_place() -> int:
    """Returns the number of this process's messages that were read in place."""
    from smddp import _core

    return _core.SymmetricBuffer.usage()[2]


def _in_use() -> int:
    from smddp import _core

    gc.collect()
    return _core.SymmetricBuffer.usage()[0]


@reads_in_place
@on_ranks(2, 3)
def test_collectives_read_symmetric_memory_and_return_it_after_each_call():
    rank, size = dist.get_rank(), dist.get_world_size()
    shard, whole = smddp.empty(40_000), smddp.empty((size, 40_000))
    halves = smddp.empty(96_000, dtype=torch.bfloat16)
    for step in range(3):
        before = _read_in_place()
        shard.fill_(rank + step)
        dist.all_gather_into_tensor(whole.view(-1), shard)
        shard.fill_(-1)
        same(whole[:, 7], torch.arange(size) + float(step))
        assert _read_in_place() > before

        part = torch.empty(40_000)
        dist.reduce_scatter_tensor(part, whole.view(-1))
        same(part, torch.full((40_000,), size * (rank + float(step))))

        halves.fill_(rank + 1)
        work = dist.all_reduce(halves, async_op=True)
        work.wait()
        same(halves, torch.full((96_000,), size * (size + 1) / 2, dtype=torch.bfloat16))


@on_ranks(2)
def test_a_tensor_owns_its_memory_and_frees_it():
    before = _in_use()
    tensor = smddp.empty(3, 5000, dtype=torch.float64)
    row = tensor[1]
    assert tensor.shape == (3, 5000) and tensor.dtype == torch.float64 and tensor.is_contiguous()
    assert _in_use() >= before + 8 * 15_000
    del tensor
    row.fill_(1)
    assert _in_use() > before
    del row
    assert _in_use() == before
    assert smddp.empty(0).shape == (0,) and smddp.empty().shape == ()
    assert smddp.empty(4, dtype="float32").dtype.name == "float32"


@on_ranks(2)
def test_a_forked_child_that_frees_it_leaves_the_parents_memory():
    tensor = smddp.empty(300 << 20, dtype=torch.uint8)  # more than is cached after it is freed
    tensor[:10] = 7
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    same(tensor[:10], torch.full((10,), 7, dtype=torch.uint8))


@on_ranks(2)
def test_invalid_sizes_and_types_are_refused():
    with pytest.raises(MemoryError, match=r"symmetric memory are not free in one piece: .* MiB are in use"):
        smddp.empty(1 << 40)
    with pytest.raises(ValueError, match="no extent may be negative"):
        smddp.empty(2, -1)
    with pytest.raises(TypeError, match="Python objects"):
        smddp.empty(2, dtype=object)


@reads_in_place
@on_ranks(2)
def test_fsdp2_allocates_its_buffers_in_symmetric_memory():
    if not isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), SmddpDevice):
        pytest.skip("torch before 2.14 cannot allocate memory from a backend in Python")
    losses = {}
    for symmetric in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for module in (model, *model):
            module.set_allocate_memory_from_process_group_for_comm(symmetric)
        before = _read_in_place()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.ones(4, 256) * (1 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[symmetric] = loss.item()
        assert (_read_in_place() > before) == symmetric
    assert losses[True] == losses[False]
