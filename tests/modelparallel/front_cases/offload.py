"""The key `offload_activations`: saved tensors are offloaded to host memory, and gradients do not change."""

from __future__ import annotations

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases import pipelines
from front_cases.by_hand import job
from lm_training import train
from torch import nn


def layers():
    torch.manual_seed(0)
    # Their inputs are 2 KiB for each microbatch: tensors below 1 KiB are not offloaded.
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(8)])


@smp.step
def step(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def whole(model):
    """The gradients of this rank's parameters."""
    return [getattr(q.grad, "full_tensor", lambda q=q: q.grad)() for q in model.local_parameters()]


def case_gradients_are_those_of_what_stays_and_loads_come_ahead(directory):
    from smddp.sagemaker import offload

    kinds = {"stages": {"partitions": 2}, "shards": {"sharded_data_parallel_degree": 2}}
    for name, keys in kinds.items():
        found = {}
        for horizon in (None, 1, 3):
            offloaded = {} if horizon is None else {"offload_activations": True, "activation_loading_horizon": horizon}
            with job(**keys, **offloaded, ddp=True, microbatches=2):
                model = smp.DistributedModel(layers())
                smp.set_activation_checkpointing(model.get_module(), strategy="each")
                offload.reset()
                loss = step(model, torch.randn(16, 64, generator=torch.Generator().manual_seed(smp.dp_rank())))
                seen = offload.statistics()
                own = 8 // smp.pp_size()
                if horizon is None:
                    assert seen.tensors_offloaded == 0
                else:
                    # Of each microbatch, the input of each of this rank's layers; only the last one is waited for.
                    assert (seen.tensors_offloaded, seen.stalls) == (2 * own, 2), seen
                    assert seen.bytes_offloaded == 2 * own * 8 * 64 * 4 and seen.bytes_on_host == 0
                    assert seen.max_resident_groups == min(horizon + 1, own), (name, seen)
                found[horizon] = [loss.reduce_mean(), *whole(model)]
        for horizon in (1, 3):
            assert all(map(torch.equal, found[horizon], found[None])), name


def case_a_transformers_model_trains_offloaded(directory):
    losses, _, _ = pipelines.one_process(range(2))
    with job(partitions=2, ddp=True, microbatches=2, offload_activations=True):
        model, optimizer = pipelines.wrapped()
        with pytest.raises(ValueError, match="no module is checkpointed"):
            train(model, optimizer, range(1))
        for block in model.get_module().transformer.h:
            smp.set_activation_checkpointing(block)
        assert train(model, optimizer, range(2))[0] == pytest.approx(losses, rel=1e-5)
