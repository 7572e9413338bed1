"""torch.distributed.pipelining: stages on different ranks, activations by point-to-point."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from training import STEPS, WIDTH, Block, assert_same, batch, loss_of, sgd

_ROWS = 16
_MICROBATCHES = 8


def _layers(count: int) -> list[nn.Module]:
    torch.manual_seed(11)
    return [Block(WIDTH) for _ in range(count - 1)] + [nn.Linear(WIDTH, 5)]


def _one_process(count: int) -> list[float]:
    model = nn.Sequential(*_layers(count))
    opt = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step, _ROWS)
        loss = loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def _pipeline(make_schedule, stages_per_rank: int = 1) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * stages_per_rank
    layers = _layers(count)
    mine = [rank + world * k for k in range(stages_per_rank)]
    stages = [PipelineStage(layers[index], index, count, torch.device("cpu")) for index in mine]
    schedule = make_schedule(stages if stages_per_rank > 1 else stages[0], _MICROBATCHES, loss_fn=loss_of)
    opt = sgd([p for index in mine for p in layers[index].parameters()])
    got = []
    for step in range(STEPS):
        x, y = batch(step, _ROWS)
        opt.zero_grad()
        losses: list[torch.Tensor] = []
        last = count - 1 in mine
        arguments = (x,) if 0 in mine else ()
        if last:
            schedule.step(*arguments, target=y, losses=losses)
        else:
            schedule.step(*arguments)
        opt.step()
        value = torch.stack(losses).mean().detach().double() if last else torch.zeros((), dtype=torch.float64)
        dist.broadcast(value, (count - 1) % world)
        got.append(value.item())
    assert_same(got, _one_process(count))


def case_1f1b():
    _pipeline(Schedule1F1B)


def case_gpipe():
    _pipeline(ScheduleGPipe)


def case_interleaved_1f1b():
    _pipeline(ScheduleInterleaved1F1B, stages_per_rank=2)
