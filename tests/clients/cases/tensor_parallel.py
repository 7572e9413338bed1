"""DTensor and parallelize_module."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from training import STEPS, WIDTH, assert_same, batch, make_model, one_process, sgd, train

_VOCABULARY = 24


def case_column_and_row():
    mesh = init_device_mesh("cpu", (4,))
    model = make_model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert_same(train(model, sgd(model.parameters()), part=(0, 1)), one_process())


def case_sequence_parallel():
    """Norms on shards of the sequence dimension: all_gather before, reduce_scatter after the linears."""
    mesh = init_device_mesh("cpu", (4,))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 32)
            self.down = nn.Linear(32, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(self.norm(x))))

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    models = Stack(), parallelize_module(Stack(), mesh, plan)
    optimizers = [sgd(model.parameters()) for model in models]
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        x = batch(step)[0].reshape(2, 4, WIDTH)
        for model, opt, log in zip(models, optimizers, losses):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            log.append(loss.item())
    assert_same(losses[1], losses[0])


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(_VOCABULARY, WIDTH)
        self.output = nn.Linear(WIDTH, _VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.embedding(words)))


def case_vocabulary_and_loss_parallel():
    """Embedding by rows, cross entropy on logits sharded over the vocabulary."""
    mesh = init_device_mesh("cpu", (4,))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plain, model = _Words(), parallelize_module(_Words(), mesh, plan)
    optimizers = sgd(plain.parameters()), sgd(model.parameters())
    wanted, got = [], []
    for step in range(STEPS):
        words = torch.randint(0, _VOCABULARY, (16,), generator=torch.Generator().manual_seed(step))
        for opt in optimizers:
            opt.zero_grad()
        one = nn.functional.cross_entropy(plain(words), words.roll(1))
        one.backward()
        with loss_parallel():
            mine = nn.functional.cross_entropy(model(words), words.roll(1))
            mine.backward()
        for opt in optimizers:
            opt.step()
        wanted.append(one.item())
        got.append(mine.full_tensor().item())
    assert_same(got, wanted)


def case_input_is_prepared():
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(5)
    plain = nn.Linear(WIDTH, 8)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 8))
    layouts = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, {"": layouts, "0": ColwiseParallel(output_layouts=Replicate())})
    x = batch(0)[0]
    out = model(x[mesh.get_local_rank() * 2 : mesh.get_local_rank() * 2 + 2])
    torch.testing.assert_close(out, plain(x), rtol=0, atol=1e-6)


def case_redistribution():
    """Every change of placement gives the full tensor back; uneven shards too."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    layouts = [
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1), Replicate()),
        (Shard(0), Shard(0)),
    ]
    for source in layouts:
        tensor = distribute_tensor(full, mesh, source)
        for target in layouts:
            moved = tensor.redistribute(placements=target)
            assert isinstance(moved, DTensor)
            assert torch.equal(moved.full_tensor(), full), (source, target)
