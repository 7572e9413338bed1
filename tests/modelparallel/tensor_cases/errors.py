"""Errors under tensor parallelism are raised on every rank, and early calls are corrected."""

from __future__ import annotations

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from tensor_cases.modules import captured_log
from torch import nn


@smp.step
def step(model, x):
    found = model(x).square().mean()
    model.backward(found)
    return found


def shared(**config):
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    smp.set_tensor_parallelism(module)
    return smp.DistributedModel(module)


BOTH = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}


def case_incompatible_batches_are_named(directory):
    with job(**BOTH, prescaled_batch=True):
        model = shared()
        with pytest.raises(ValueError, match=r"x differs between the ranks 0 and 1 of a tensor group"):
            step(model, torch.full((2, 4), float(smp.tp_rank())))
        step(model, torch.ones(2, 4))
    with job(**BOTH, microbatches=2):
        model = shared()
        with pytest.raises(ValueError, match=r"shapes \(2, 4\), \(2, 5\) on the ranks of a tensor group"):
            step(model, torch.ones(2, 4 + smp.tp_rank()))
        with pytest.raises(ValueError, match="3 elements along axis 0, which 2 microbatches do not divide"):
            step(model, torch.ones(2 + smp.tp_rank(), 4))

        class Own:
            def smp_slice(self, *_):
                return torch.ones(2, 4)

        with pytest.raises(ValueError, match=r"smp_slice.*'prescaled_batch': True"):
            step(model, Own())
        # Ranks may have batches of different sizes.
        step(model, torch.ones(2 + 2 * smp.tp_rank(), 4))
        with pytest.raises(RuntimeError, match="called outside of a step"):
            model(torch.ones(2, 4))


def case_a_failure_in_a_part_ends_the_step_on_all_ranks_and_another_can_follow(directory):
    class Fails(nn.Linear):
        wrong = True

        def forward(self, x):
            if self.wrong:
                raise KeyError("nothing there")
            return super().forward(x)

    with job(**BOTH, microbatches=2, auto_partition=False, default_partition=0, skip_tracing=True):
        module = nn.Sequential(nn.Linear(4, 8), Fails(8, 4))
        smp.set_tensor_parallelism(module[0])
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)
        with pytest.raises(RuntimeError, match=r"stage 1, module 1: KeyError: 'nothing there'"):
            step(model, torch.ones(4, 4))
        module[1].wrong = False
        assert torch.isfinite(step(model, torch.ones(4, 4)).reduce_mean())


def case_an_optimizer_that_was_made_before_follows_the_parameters(directory):
    for after in (False, True):
        with job(tensor_parallel_degree=2, ddp=True):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            smp.set_tensor_parallelism(module)
            made = torch.optim.SGD(module.parameters(), lr=0.5)
            optimizer = None if after else smp.DistributedOptimizer(made)
            model = smp.DistributedModel(module)
            optimizer = smp.DistributedOptimizer(made) if after else optimizer
            before = module[0].weight.clone()
            step(model, torch.ones(2, 4))
            optimizer.step()
            held = [id(q) for group in optimizer.param_groups for q in group["params"]]
            assert held == [id(q) for q in model.parameters()] and not torch.equal(before, module[0].weight)


def case_unshared_modules_are_logged(directory):
    with job(tensor_parallel_degree=2, ddp=True), captured_log() as lines:
        model = smp.DistributedModel(nn.Linear(4, 4))
        assert "nothing is shared" in lines[0]
        model = nn.Linear(4, 4)
        smp.set_tensor_parallelism(model, use_alibi=True, fused_softmax=True)
        model = smp.DistributedModel(model)
        assert "use_alibi has no effect" in lines[1] and "Linear stays whole" in lines[2]
        with pytest.raises(RuntimeError, match=r"comes before smp\.DistributedModel"):
            smp.set_tensor_parallelism(model)
    with job(tensor_parallel_degree=4), captured_log() as lines:
        from tensor_cases.families import gpt2

        with smp.tensor_parallelism():
            module = gpt2()
        smp.DistributedModel(module)
        assert any("does not divide this model" in line for line in lines), lines
