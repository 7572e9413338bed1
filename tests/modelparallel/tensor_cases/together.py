"""Tensor parallelism with what else a step does: random numbers, checkpointed activations, float16, LAMB, timing."""

from __future__ import annotations

import time

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import batch, loss_of, mine, train_step
from smddp.modelparallel.optim.optimizers import FusedLAMB, FusedNovoGrad
from smddp.modelparallel.tensor.split import split_of
from tensor_cases.families import made
from torch import nn

BOTH = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}


def dropping():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2))


def case_dropout_and_checkpointing_keep_whole_parameters_bitwise_equal(directory):
    found = []
    for checkpointed in (False, True):
        with job(**BOTH, microbatches=2):
            module = made(dropping)
            smp.set_tensor_parallelism(module)
            model = smp.DistributedModel(module)
            assert len(module.transformer.seq_layers) == 4
            assert not any("seq_layers" in name for name in module.state_dict())
            if checkpointed:
                smp.set_activation_checkpointing(module.transformer.seq_layers, strategy="group_2")
            # Ranks with different random states.
            torch.manual_seed(smp.rank() if smp.dp_rank() else 5)
            loss = train_step(model, mine(0)).reduce_mean()
            gradients = {name: q.grad for name, q in model.local_named_parameters()}
            whole = {n: g for n, g in gradients.items() if split_of(module.get_parameter(n)) is None}
            for name, values in ((n, smp.allgather(g, smp.CommGroup.TP_GROUP)) for n, g in whole.items()):
                assert torch.equal(*values), name
            found.append((loss, gradients))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


class Late(nn.Module):
    """A layer that takes another time on each rank for each call."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x):
        self.calls += 1
        if self.late:
            time.sleep(0.002 * ((self.calls * 7 + smp.rank() * 5) % 4))
        return x + self.down(torch.tanh(self.up(x)))

    late = False


def case_tensor_group_ranks_run_microbatches_in_the_same_order(directory):
    found = []
    for late in (False, True, True):
        with job(**BOTH, microbatches=8):
            torch.manual_seed(0)
            # Neighbours on alternating stages, so that each microbatch passes between them often.
            module = nn.Sequential(*(Late() for _ in range(4)))
            smp.set_tensor_parallelism(module)
            for number, layer in enumerate(module):
                layer.late = late
                smp.set_partition(layer, number % 2)
            model = smp.DistributedModel(module)

            @smp.step
            def step(model, x):
                loss = model(x).square().sum()
                model.backward(loss)
                return loss

            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(smp.dp_rank()))
            losses = step(model, x).stack()
            found.append([losses, *(q.grad for q in model.local_parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def case_lamb_and_novograd_use_whole_tensor_norms(directory):
    for kind, options in ((FusedLAMB, {}), (FusedNovoGrad, {}), (FusedNovoGrad, {"norm_type": float("inf")})):
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        of_one = kind(alone.parameters(), lr=0.1, **options)
        x = torch.randn(8, 8)
        with job(tensor_parallel_degree=2, ddp=True):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
            smp.set_tensor_parallelism(module)
            model = smp.DistributedModel(module)
            optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.1, **options))

            @smp.step
            def step(model, x):
                loss = model(x).square().mean()
                model.backward(loss)
                return loss

            for _ in range(2):
                alone(x).square().mean().backward()
                step(model, x.chunk(4)[smp.dp_rank()])
                for each in (of_one, optimizer):
                    each.step()
                    each.zero_grad()
            torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                optimizer.state_dict()["state"], of_one.state_dict()["state"], rtol=1e-4, atol=1e-6
            )


def case_float16_with_masters_trains_as_without_tensor_parallelism(directory):
    from tensor_cases.families import gpt2

    found = []
    for degree in (1, 2):
        with job(tensor_parallel_degree=degree, pipeline_parallel_degree=2, microbatches=2, fp16=True, ddp=True):
            module = made(gpt2)
            smp.set_tensor_parallelism(module)
            model = smp.DistributedModel(module)
            optimizer = smp.DistributedOptimizer(
                torch.optim.AdamW(model.parameters(), lr=1e-3), dynamic_loss_scale=True, init_scale=2.0**10
            )
            norms = []
            for number in range(2):
                train_step(model, batch(number).chunk(smp.dp_size())[smp.dp_rank()])
                norms.append(optimizer.clip_master_grads(1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            whole = optimizer.state_dict()
            found.append((norms, whole["masters"], whole["state"]))
            again = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), dynamic_loss_scale=True)
            again.load_state_dict(whole)
            torch.testing.assert_close(again.state_dict()["masters"], whole["masters"], rtol=0, atol=0)
    assert found[1][0] == pytest.approx(found[0][0], rel=5e-3)
    assert found[1][1].keys() == found[0][1].keys()
    for number, master in found[0][1].items():
        torch.testing.assert_close(found[1][1][number], master, rtol=0, atol=3e-3)
    alone = made(gpt2)
    assert torch.isfinite(loss_of(alone, batch(0)))
