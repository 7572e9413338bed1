"""Delayed initialization: equal values under every cut and sharding."""

from __future__ import annotations

import copy

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases import pipelines
from front_cases.by_hand import job
from lm_training import train, train_alone
from smddp.modelparallel import delayed
from torch import nn

KEYS = {"ddp": True, "microbatches": 2, "delayed_parameter_initialization": True}


def on_meta():
    with smp.delay_param_initialization():
        return pipelines.gpt2()


def one_process(numbers):
    """Losses and norms of a model with the values that all get, and what it was before."""
    model = on_meta()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    delayed.everywhere(model, torch.initial_seed())
    before = copy.deepcopy(model.state_dict())
    return *train_alone(model, pipelines.adam(model), numbers), before, model.state_dict()


def wrapped():
    model = smp.DistributedModel(on_meta())
    return model, smp.DistributedOptimizer(pipelines.adam(model))


def case_values_are_the_same_under_every_cut(directory):
    from smddp.sagemaker import dtensor_shards

    losses, norms, before, after = one_process(range(3))
    assert 0.01 < before["transformer.wte.weight"].std() < 0.03
    cuts = {
        "four stages": {"partitions": 4},
        "two": {"partitions": 2},
        "one": {},
        "shards": {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.5},
    }
    real = dtensor_shards.put
    for name, keys in cuts.items():
        made = []

        def put(value, target, made=made):
            made.append(value.numel())
            return real(value, target)

        with job(**KEYS, **keys):
            dtensor_shards.put = put
            try:
                model, optimizer = wrapped()
                if "partitions" in keys:
                    assert not made and all(parameter.is_meta for parameter in model.parameters())
                    with pytest.raises(RuntimeError, match="get their values at the first step"):
                        model.state_dict()
                    model.register_post_partition_hook(
                        lambda *_, model=model, seen=made: seen.append(copy.deepcopy(model.state_dict()))
                    )
                    found = train(model, optimizer, range(3))
                    values = made.pop()
                else:
                    values = copy.deepcopy(model.state_dict())
                    found = train(model, optimizer, range(3))
            finally:
                dtensor_shards.put = real
            torch.testing.assert_close(dict(values), dict(before), rtol=0, atol=0)
            # Parameters of other stages were not created.
            own = sum(getattr(q, "to_local", lambda q=q: q)().numel() for q in model.local_parameters())
            assert (
                sum(made) == own == sum(getattr(q, "to_local", lambda q=q: q)().numel() for q in model.parameters())
            ), name
            assert not any(q.is_meta for q in model.parameters())
            assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(norms, rel=1e-4)
            torch.testing.assert_close(dict(model.state_dict()), dict(after), rtol=1e-3, atol=1e-4)


def case_state_loaded_before_the_cut_replaces_initial_values(directory):
    losses, _, _ = pipelines.one_process(range(4))
    with job(ddp=True, partitions=2, microbatches=2):
        model, optimizer = pipelines.wrapped()
        train(model, optimizer, range(2))
        smp.save_checkpoint(directory, "parts")
        smp.save_checkpoint(directory, "whole", partial=False)
    for keys in ({"partitions": 4}, {}, {"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0.5}):
        for tag in ("parts", "whole"):
            with job(**KEYS, **keys):
                model, optimizer = wrapped()
                smp.resume_from_checkpoint(directory, tag, partial=tag == "parts")
                assert train(model, optimizer, range(2, 3))[0] == pytest.approx(losses[2:3], rel=1e-5)


class Rooted(nn.Module):
    """A parameter of the root, whose code runs on all stages."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def case_root_parameters_are_initialized_and_unsupported_modules_are_refused(directory):
    @smp.step
    def step(model, x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    found = []
    for keys in ({"partitions": 4}, {"partitions": 2, "fp16": True}, {"partitions": 1}):
        with job(**{**KEYS, "microbatches": 1, **keys}):
            torch.manual_seed(5)
            with smp.delay_param_initialization():
                module = Rooted()
            model = smp.DistributedModel(module)
            loss = step(model, torch.ones(2, 6))
            found.append(loss.reduce_mean().item())
    assert found[0] == found[2] and found[1] == pytest.approx(found[0], rel=0.05)

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.layer(x) * self.weight

    with job(**KEYS):
        with smp.delay_param_initialization():
            module = Constant()
            given = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"no way to initialise 1 tensors .*weight .*reset_parameters"):
            smp.DistributedModel(module)
        with smp.delay_param_initialization():
            given.weight = nn.Parameter(torch.ones(2, 2))
        # A loaded value replaces the parameter.
        assert given.bias.is_meta and given.weight.sum() == 4
