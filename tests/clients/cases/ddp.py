"""DistributedDataParallel in its usual forms."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    ROWS,
    STEPS,
    WIDTH,
    assert_same,
    batch,
    loss_of,
    make_model,
    mean_over_ranks,
    one_process,
    sgd,
    slice_of,
    train,
)


def _plain(**options) -> None:
    model = DDP(make_model(), **options)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_plain():
    _plain()


def case_many_small_buckets():
    _plain(bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def case_static_graph():
    _plain(static_graph=True)


def case_on_a_separate_group():
    _plain(process_group=dist.new_group())


class _Linear(nn.Module):
    """Its gradients are small integers over a power of two: exact in every 16-bit format."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def _integers(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-3, 4, (ROWS, WIDTH), generator=generator).float()


def _with_hook(hook) -> None:
    plain, model = _Linear(), DDP(_Linear())
    model.register_comm_hook(None, hook)
    optimizers = sgd(plain.parameters()), sgd(model.parameters())
    wanted, got = [], []
    for step in range(STEPS):
        x = _integers(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        one = plain(x).mean()
        one.backward()
        mine = model(slice_of(x)).mean()
        mine.backward()
        for optimizer in optimizers:
            optimizer.step()
        wanted.append(one.item())
        got.append(mean_over_ranks(mine))
    assert_same(got, wanted)


def case_fp16_compress_hook():
    _with_hook(default_hooks.fp16_compress_hook)


def case_bf16_compress_hook():
    _with_hook(default_hooks.bf16_compress_hook)


def case_allreduce_hook():
    _with_hook(default_hooks.allreduce_hook)


def case_powersgd_hook_before_it_compresses():
    model = DDP(make_model())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=STEPS + 1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_builtin_hook():
    model = DDP(make_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_no_sync():
    model = DDP(make_model())
    opt = sgd(model.parameters())
    got = []
    for step in range(STEPS):
        x, y = (slice_of(t) for t in batch(step))
        opt.zero_grad()
        halves = list(zip(x.chunk(2), y.chunk(2)))
        total = torch.zeros(())
        for index, (part, target) in enumerate(halves):
            if index + 1 < len(halves):
                with model.no_sync():
                    loss = loss_of(model(part), target) / len(halves)
                    loss.backward()
            else:
                loss = loss_of(model(part), target) / len(halves)
                loss.backward()
            total += loss.detach()
        opt.step()
        got.append(mean_over_ranks(total))
    assert_same(got, one_process())


class _Branches(nn.Module):
    """Uses one of two branches, by the step: the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(2))
        self.common = nn.Linear(5, 5)
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.common(torch.tanh(self.branches[self.which](x)))


def case_find_unused_parameters():
    plain = _Branches()
    model = DDP(_Branches(), find_unused_parameters=True)
    optimizers = sgd(plain.parameters()), sgd(model.parameters())
    wanted, got = [], []
    for step in range(STEPS):
        x, y = batch(step)
        plain.which = model.module.which = step % 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        one = loss_of(plain(x), y)
        one.backward()
        mine = loss_of(model(slice_of(x)), slice_of(y))
        mine.backward()
        for optimizer in optimizers:
            optimizer.step()
        wanted.append(one.item())
        got.append(mean_over_ranks(mine))
    assert_same(got, wanted)


def case_join_with_uneven_inputs():
    """Rank r has r + 2 batches; with Join the gradient is the sum over ranks still there, over the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [r + 2 for r in range(world)]
    plain = make_model()
    opt = sgd(plain.parameters())
    wanted = []
    for step in range(max(counts)):
        x, y = batch(step)
        opt.zero_grad()
        for r in range(world):
            if step < counts[r]:
                loss = loss_of(plain(slice_of(x, r, world)), slice_of(y, r, world))
                (loss / world).backward()
                if r == rank:
                    wanted.append(loss.item())
        opt.step()

    model = DDP(make_model())
    opt = sgd(model.parameters())
    got = []
    with model.join():
        for step in range(counts[rank]):
            x, y = batch(step)
            loss = loss_of(model(slice_of(x)), slice_of(y))
            opt.zero_grad()
            loss.backward()
            opt.step()
            got.append(loss.item())
    assert_same(got, wanted)


def case_buffers_follow_rank_0():
    """Running statistics of different data differ until rank 0's are broadcast."""
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)))
    model(slice_of(batch(0)[0])).sum().backward()
    first = model.module[1].running_mean.clone()
    dist.broadcast(first, 0)
    model._sync_buffers()
    assert torch.equal(model.module[1].running_mean, first)


def case_backward_on_another_thread():
    import threading

    model = DDP(make_model())
    got: list[float] = []
    opt = sgd(model.parameters())
    thread = threading.Thread(target=lambda: got.extend(train(model, opt)))
    thread.start()
    thread.join()
    assert_same(got, one_process())


def case_rank_0s_weights_reach_all_ranks():
    """DDP's constructor broadcasts parameters and buffers: only rank 0 starts with the right ones."""
    model = make_model()
    if dist.get_rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
    model = DDP(model)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_debug_detail():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective's shape across ranks."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    _plain()
    _plain(process_group=dist.new_group())


# The level has to be set before the default group is made.
case_debug_detail.debug_level = "DETAIL"
