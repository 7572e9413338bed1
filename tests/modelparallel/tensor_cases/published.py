"""Published forms with the numbers of one process: wrapped optimizers, `fp16_params`, names of layers, keys."""

from __future__ import annotations

import copy

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from torch import nn

BOTH = {"tensor_parallel_degree": 2, "partitions": 2, "microbatches": 2, "ddp": True, "prescaled_batch": True}


class FP16_Optimizer:
    """Float32 copies of parameters and a loss scale, as published scripts bring them; no torch.optim.Optimizer."""

    def __init__(self, optimizer, backward=torch.Tensor.backward):
        self.optimizer, self._backward = optimizer, backward
        self.loss_scale, self.overflow, self.pairs = 128.0, False, []

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def init_master_params(self):
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                master = nn.Parameter(parameter.detach().float().clone())
                self.pairs.append((parameter, master))
                group["params"][index] = master

    def backward(self, loss, update_master_grads=True):
        self._backward(loss.float() * self.loss_scale)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self):
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float() / self.loss_scale

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def zero_grad(self, set_grads_to_None=False):
        for pair in self.pairs:
            for tensor in pair:
                tensor.grad = None if set_grads_to_None or tensor.grad is None else tensor.grad.zero_()

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, values):
        self.optimizer.load_state_dict(values)


class FP16_Module(nn.Module):
    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x):
        return self.module(x.to(self.dtype)).float()


def layers(dtype):
    torch.manual_seed(0)
    return FP16_Module(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]), dtype)


def batch(number):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number))


def loss_of(model, x):
    return (model(x) - 0.3).square().mean()


@smp.step
def train_step(model, optimizer, x):
    loss = loss_of(model, x)
    optimizer.backward(loss, update_master_grads=False)
    return loss


def of_one_process(dtype, numbers):
    module = layers(dtype).to(dtype)
    optimizer = FP16_Optimizer(torch.optim.AdamW(module.parameters(), lr=0.05))
    optimizer.init_master_params()
    losses = []
    for number in numbers:
        loss = loss_of(module, batch(number))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=True)
        losses.append(loss.item())
    return losses, optimizer


def distributed(dtype):
    with smp.tensor_parallelism():
        module = layers(dtype)
    model = smp.DistributedModel(module)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    script = FP16_Optimizer(inner, model.backward)
    optimizer = smp.DistributedOptimizer(script)
    assert optimizer is script
    model.register_post_step_hook(lambda model, optimizer: optimizer.init_master_params())
    return model, optimizer


def train(model, optimizer, numbers):
    losses = []
    for number in numbers:
        mine = batch(number).chunk(smp.rdp_size())[smp.rdp_rank()]
        loss = train_step(model, optimizer, mine).reduce_mean().item()
        losses.append(sum(smp.allgather(loss)) / smp.size())
        optimizer.update_master_grads()
        optimizer.step()
        optimizer.zero_grad(set_grads_to_None=True)
    return losses


SHARDED = [{"tensor_parallel_degree": 2, "prescaled_batch": True}, {"partitions": 2}]


def case_wrapped_optimizer_trains_and_saves_as_in_one_process(directory):
    expected, alone = of_one_process(torch.float32, range(4))
    for keys in (BOTH, *({**each, "microbatches": 2, "ddp": True, "shard_optimizer_state": True} for each in SHARDED)):
        check_against(expected, alone, keys, directory)


def check_against(expected, alone, keys, directory):
    with job(**keys):
        model, optimizer = distributed(torch.float32)
        assert train(model, optimizer, range(4)) == pytest.approx(expected, rel=1e-5)
        whole, reference = copy.deepcopy(optimizer.state_dict()), alone.state_dict()
        assert whole["state"].keys() == reference["state"].keys()
        for number, values in reference["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(whole["state"][number][name], value, rtol=1e-4, atol=1e-6)
        assert len(optimizer.orig_state_dict()["state"]) == len(optimizer.optimizer.param_groups[0]["params"])
        smp.save_checkpoint(directory, tag="parts", partial=True, model=model, optimizer=optimizer)
        smp.save_checkpoint(directory, tag="whole", partial=False, model=model, optimizer=optimizer)
        saved = torch.load(f"{directory}/optimizer_whole")["state"]
        assert all(torch.equal(x["exp_avg"], saved[n]["exp_avg"]) for n, x in whole["state"].items())
        part = copy.deepcopy(optimizer.save_optimizer_backcompat(gather_if_shard=1))
        for values in (whole, part):
            for held in optimizer.optimizer.state.values():
                held["exp_avg"].zero_()
            optimizer.load_optimizer_backcompat(copy.deepcopy(values), 1)
            after = optimizer.state_dict()
            assert all(torch.equal(x["exp_avg"], after["state"][n]["exp_avg"]) for n, x in whole["state"].items())


def case_wrapped_optimizer_that_cannot_work_is_refused(directory):
    for key, value in (("fp16", True), ("sharded_data_parallel_degree", 2)):
        with job(ddp=True, **{key: value}):
            model = smp.DistributedModel(layers(torch.float32))
            with pytest.raises(ValueError, match=f"'{key}'={value} needs a torch.optim.Optimizer, got FP16_Optimizer"):
                smp.DistributedOptimizer(FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    with job(**BOTH):
        model, optimizer = distributed(torch.float32)
        optimizer.init_master_params()
        with pytest.raises(Exception, match="8 parameters of FP16_Optimizer are copies"):
            train_step(model, optimizer, batch(0))
        with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, or an object with one"):
            smp.DistributedOptimizer(object())


def case_fp16_params_train_as_half_precision_does_in_one_process(directory):
    expected, _ = of_one_process(torch.float16, range(6))
    in_float, _ = of_one_process(torch.float32, range(6))
    with job(**BOTH, fp16_params=True):
        model, optimizer = distributed(torch.float16)
        assert {q.dtype for q in model.parameters()} == {torch.float16}
        found = train(model, optimizer, range(6))
        assert found == pytest.approx(expected, rel=5e-3) and found == pytest.approx(in_float, rel=2e-2)
        assert found[-1] < 0.5 * found[0]
        assert {q.dtype for q in model.state_dict().values()} == {torch.float16}
    with job(partitions=2, ddp=True, fp16_params=True):
        assert {q.dtype for q in smp.DistributedModel(layers(torch.float32)).parameters()} == {torch.float32}
