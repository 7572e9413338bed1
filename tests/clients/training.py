"""The small training job that every client runs, and the one process it is compared with.

The global batch of a step is a function of the step alone; a rank takes its slice of rows. One
process trains on the whole batch, a client on the slices; the mean of the ranks' losses must equal
the one process's loss at every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

STEPS = 5
ROWS = 8
WIDTH = 16
TOLERANCE = 1e-6


class Block(nn.Module):
    """Residual two-layer block: a unit for wrapping policies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a head; the odd widths make shards uneven and padded."""

    def __init__(self, width: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    """The same weights on every rank and in the one process."""
    torch.manual_seed(1234)
    return Model().to(dtype)


def batch(step: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, WIDTH) and targets (rows, 5) of a step."""
    generator = torch.Generator().manual_seed(9000 + step)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def slice_of(tensor: torch.Tensor, rank: int | None = None, parts: int | None = None) -> torch.Tensor:
    """This rank's rows of a global batch."""
    rank = dist.get_rank() if rank is None else rank
    parts = dist.get_world_size() if parts is None else parts
    rows = tensor.shape[0] // parts
    return tensor[rank * rows : (rank + 1) * rows]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def one_process(
    steps: int = STEPS,
    make: Callable[[], nn.Module] = make_model,
    optimizer: Callable = sgd,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Losses of the same job without any distribution."""
    model = make()
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        x, y = batch(step, dtype=dtype)
        loss = loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(loss.item())
    return losses


def mean_over_ranks(value: torch.Tensor, group=None) -> float:
    value = value.detach().to(torch.float64).clone()
    dist.all_reduce(value, group=group)
    return value.item() / dist.get_world_size(group)


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: range = range(STEPS),
    part: tuple[int, int] | None = None,
    clip: Callable[[], object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Trains a distributed ``model``; ``part`` is (index, parts) of the batch, by default rank and world.

    Returns the losses of the global batch.
    """
    index, parts = part or (dist.get_rank(), dist.get_world_size())
    losses = []
    for step in steps:
        x, y = batch(step, dtype=dtype)
        loss = loss_of(model(slice_of(x, index, parts)), slice_of(y, index, parts))
        opt.zero_grad()
        loss.backward()
        if clip is not None:
            clip()
        opt.step()
        losses.append(mean_over_ranks(loss))
    return losses


def assert_same(got: list[float], wanted: list[float], tolerance: float = TOLERANCE) -> None:
    """Checks that every step's loss equals the reference within ``tolerance``, and that the reference changes."""
    assert len(got) == len(wanted), f"{len(got)} losses, expected {len(wanted)}"
    worst = max(abs(a - b) for a, b in zip(got, wanted))
    assert worst <= tolerance, f"losses differ by {worst:.3e}:\n got  {got}\n want {wanted}"
    assert len(set(wanted)) == len(wanted), f"the reference does not move: {wanted}"
