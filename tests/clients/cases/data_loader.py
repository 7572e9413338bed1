"""Data loader workers forked from a rank whose group is already in use."""

import multiprocessing

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training import ROWS, STEPS, assert_same, batch, loss_of, make_model, mean_over_ranks, one_process, sgd


class _Rows(Dataset):
    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(index // ROWS)
        return x[index % ROWS], y[index % ROWS]


def _train(**options) -> None:
    model = DDP(make_model())  # its constructor has used the group before the workers are forked
    opt = sgd(model.parameters())
    rows = _Rows()
    sampler = DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, batch_size=ROWS // dist.get_world_size(), sampler=sampler, **options)
    got = []
    for x, y in loader:
        loss = loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        got.append(mean_over_ranks(loss))
    assert_same(got, one_process())


def case_forked_workers():
    _train(num_workers=2, multiprocessing_context="fork")


def case_persistent_forked_workers():
    _train(num_workers=1, multiprocessing_context="fork", persistent_workers=True, prefetch_factor=4)


def _leave(code: int) -> None:
    raise SystemExit(code)


def case_a_forked_child_ends_without_disturbing_the_group():
    """A child that runs Python's exit handlers must not close what its parent still uses."""
    value = torch.ones(4)
    dist.all_reduce(value)
    child = multiprocessing.get_context("fork").Process(target=_leave, args=(3,))
    child.start()
    child.join(20)
    assert child.exitcode == 3
    dist.all_reduce(value)
    assert value[0].item() == dist.get_world_size() ** 2
