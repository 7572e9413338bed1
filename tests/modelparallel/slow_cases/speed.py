"""The bubble, with layers that sleep: the machine's cores do not matter."""

import time

import torch
import torch.distributed as dist
from pipeline_cases.against import Pipeline
from smddp.modelparallel.pipeline.schedule import simulate
from smddp.modelparallel.state import state
from torch import nn

FORWARD, BACKWARD = 0.05, 0.1


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient


class Layer(nn.Linear):
    def forward(self, x):
        return Sleep.apply(super().forward(x))


class Sleeps(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Layer(64, 64) for _ in range(4))
        self.last = nn.Linear(64, 64)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def square(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def ratio(tied, microbatches, pipeline):
    def place(net, stages):
        layers = [(layer, stage) for stage, layer in enumerate(net.layers)]
        return [*layers, (net.last, 0 if tied else stages - 1)]

    rows = (torch.randn(microbatches, 64),)
    with Pipeline(lambda: Sleeps(tied), square, rows, 4, microbatches, pipeline, place=place) as both:
        both.run()
        best = float("inf")
        for _ in range(3):
            dist.barrier()
            begun = time.perf_counter()
            both.run()
            best = min(best, time.perf_counter() - begun)
        visits, shares = [0, 1, 2, 3] + [0] * tied, [1.0] * 4 + [0.0] * tied
        plan = simulate(visits, microbatches, pipeline, state.cfg.active_microbatches, FORWARD, BACKWARD, shares)
        if not tied:
            assert abs(plan.length - (microbatches + 3) * (FORWARD + BACKWARD)) < 1e-9
        return best / plan.length


def case_a_straight_pipeline_takes_the_time_of_theory():
    for microbatches in (4, 8, 16):
        for pipeline in ("interleaved", "simple"):
            found = ratio(False, microbatches, pipeline)
            assert found <= 1.08, (microbatches, pipeline, found)


def case_a_loop_takes_the_time_of_its_plan():
    for microbatches in (4, 8, 16):
        for pipeline in ("interleaved", "simple"):
            found = ratio(True, microbatches, pipeline)
            assert found <= 1.15, (microbatches, pipeline, found)
