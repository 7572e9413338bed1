"""The key `fp16`: a float16 model whose float32 masters are stepped, and a loss scale that all stages agree on."""

from __future__ import annotations

import copy

import lm_training
import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from torch import nn


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def batch(number):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


@smp.step
def train_step(model, x):
    loss = (model(x) - 0.3).square().mean()
    assert loss.dtype == torch.float32
    model.backward(loss)
    return loss


def train(model, optimizer, numbers):
    losses = []
    for number in numbers:
        losses.append(train_step(model, batch(number)).reduce_mean().item())
        optimizer.clip_master_grads(0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrapped(**scale):
    model = smp.DistributedModel(layers())
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02), **scale)


def case_masters_train_as_float32_does_but_for_rounding(directory):
    found = {}
    for name, keys in (("float", {}), ("half", {"fp16": True}), ("alone", {"fp16": True, "partitions": 1})):
        with job(**{"partitions": 4, "microbatches": 2, "ddp": True, **keys}):
            model, optimizer = wrapped(**({"static_loss_scale": 128.0} if keys else {}))
            found[name] = train(model, optimizer, range(8))
            assert optimizer.loss_scale == (128.0 if keys else 1.0) and not optimizer.overflow
            if keys:
                assert {p.dtype for p in model.local_parameters()} == {torch.float16}
                assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
    assert found["half"] == pytest.approx(found["float"], rel=0.02)
    assert found["half"] == pytest.approx(found["alone"], rel=1e-3)
    assert found["half"][-1] < 0.9 * found["half"][0]


def case_a_nonfinite_step_is_skipped_on_all_stages(directory):
    with job(partitions=4, microbatches=2, fp16=True):
        model, optimizer = wrapped(
            dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**40, "scale_window": 2}
        )
        before = {name: value.float() for name, value in layers().half().state_dict().items()}
        skipped = 0
        train(model, optimizer, range(1))
        while optimizer.step_was_skipped:
            skipped += 1
            assert optimizer.overflow and optimizer.loss_scale == 2.0 ** (40 - skipped)
            for name, parameter in model.local_named_parameters():
                assert torch.equal(parameter.float(), before[name])
            train(model, optimizer, range(1))
        assert 1 <= skipped < 40 and len(set(smp.allgather(optimizer.loss_scale))) == 1
        train(model, optimizer, range(1, 2))
        assert optimizer.loss_scale == 2.0 ** (40 - skipped + 1)
        with pytest.raises(ValueError, match="unknown dynamic_loss_args window"):
            smp.DistributedOptimizer(torch.optim.SGD(layers().parameters()), dynamic_loss_args={"window": 1})


def case_masters_and_scale_resume_under_another_cut(directory):
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}}
    with job(partitions=4, microbatches=2, fp16=True):
        model, optimizer = wrapped(**scale)
        train(model, optimizer, range(3))
        smp.save_checkpoint(directory, "parts")
        smp.save_checkpoint(directory, "whole", partial=False)
        whole = copy.deepcopy(optimizer.state_dict())
        assert whole["loss_scale"]["scale"] == 128.0 and len(whole["masters"]) == 8
        expected = train(model, optimizer, range(3, 5))
    for partitions, tag in ((4, "parts"), (2, "parts"), (2, "whole"), (1, "whole")):
        with job(partitions=partitions, microbatches=2, fp16=True, ddp=True):
            model, optimizer = wrapped(**scale)
            smp.resume_from_checkpoint(directory, tag, partial=tag == "parts")
            found = train(model, optimizer, range(3, 5))
            assert found == pytest.approx(expected, rel=1e-3)
            assert optimizer.loss_scale == 256.0


def case_a_transformers_model_takes_float16_and_returns_float32(directory):
    from front_cases import pipelines

    losses, norms, _ = pipelines.one_process(range(2))
    with job(partitions=2, microbatches=2, fp16=True, ddp=True):
        model = smp.DistributedModel(pipelines.gpt2())
        optimizer = smp.DistributedOptimizer(pipelines.adam(model), static_loss_scale=256.0)
        for number in range(2):
            ids = lm_training.batch(number).chunk(smp.dp_size())[smp.dp_rank()]
            loss = lm_training.train_step(model, ids).reduce_mean()
            norm = optimizer.clip_master_grads(0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert sum(smp.allgather(loss.item())) / smp.size() == pytest.approx(losses[number], rel=0.01)
            assert norm.item() == pytest.approx(norms[number], rel=0.05)
