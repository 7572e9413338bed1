"""`model(x); loss.backward()` without `@smp.step`: the losses of one process, or an error."""

from __future__ import annotations

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import gpt2, loss_of, mine
from tensor_cases.families import adam, made, one_process
from torch import nn
from torch.nn.utils import clip_grad_norm_

LAYOUTS = [
    {"tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 2, "prescaled_batch": True},
    {"tensor_parallel_degree": 4},
    {},
    {"shard_optimizer_state": True},
    {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
    {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0, "tensor_parallel_degree": 2},
    {
        "sharded_data_parallel_degree": 2,
        "sdp_gradient_clipping": 0.0,
        "tensor_parallel_degree": 2,
        "prescaled_batch": True,
    },
]


class Net(nn.Module):
    """Returns a dictionary, one of whose tensors takes no part in the loss."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return {"found": self.inner(x) * scale, "more": (self.unused(x), None)}


def rows(number=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def own(x):
    """This rank's part of a batch."""
    shared = smp.state.cfg.prescaled_batch
    size, rank = (smp.rdp_size(), smp.rdp_rank()) if shared else (smp.dp_size(), smp.dp_rank())
    return x.chunk(size)[rank]


def wrapped():
    with smp.tensor_parallelism():
        torch.manual_seed(0)
        net = Net()
    model = smp.DistributedModel(net)
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@smp.step
def in_a_step(model, x):
    loss = model(x)["found"].square().mean()
    model.backward(loss)
    return loss


def mean(loss):
    return sum(smp.allgather(loss.item())) / smp.size()


def forms(model, number, x):
    """The loss of one optimizer step, in the forms that scripts have: its backward pass is done."""
    if number == 1:  # two forward passes and one backward pass
        loss = model(x)["found"].square().mean() + model(x, scale=0.5)["found"].square().mean()
        loss.backward()
    elif number == 2:  # gradients of two backward passes
        loss = model(x)["found"].square().mean()
        loss.backward()
        model(x, scale=2.0)["found"].abs().mean().backward()
    else:
        loss = model(x)["found"].square().mean()
        loss.backward()
    return loss


def case_losses_and_parameters_are_those_of_one_process(directory):
    torch.manual_seed(0)
    alone = Net()
    optimizer, losses, input_gradients = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), [], []
    for number in range(4):
        x = rows(number).requires_grad_()
        losses.append(forms(alone, number, x).item())
        input_gradients.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
    for layout in LAYOUTS:
        with job(ddp=True, **layout):
            model, optimizer = wrapped()
            for number in range(4):
                x = own(rows(number)).clone().requires_grad_()
                # The last in a step: calls inside and outside of one follow each other.
                if number == 3:
                    loss = in_a_step(model, x.detach()).reduce_mean()
                else:
                    loss = forms(model, number, x)
                    # This rank's loss is the mean over the samples that it gave.
                    torch.testing.assert_close(x.grad, own(input_gradients[number]) * (8 / len(x)), msg=str(layout))
                assert mean(loss) == pytest.approx(losses[number], rel=1e-5), (layout, number)
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
            with torch.no_grad():  # evaluation, of this rank's samples
                torch.testing.assert_close(model(own(rows()))["found"], own(alone(rows())["found"]))
            assert model.get_module().unused.weight.grad is None


def case_a_transformers_model_trains_without_a_step(directory):
    losses, norms, *_ = one_process(gpt2)
    for layout in LAYOUTS[:2]:
        with job(ddp=True, **layout):
            with smp.tensor_parallelism():
                model = smp.DistributedModel(made(gpt2))
            optimizer = smp.DistributedOptimizer(adam(model))
            for number in range(2):
                loss = loss_of(model, mine(number))
                loss.backward()
                assert mean(loss) == pytest.approx(losses[number], rel=1e-5)
                assert clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(norms[number], rel=1e-4)
                optimizer.step()
                optimizer.zero_grad()
            assert model(input_ids=mine(0)).logits.shape[0] == len(mine(0))
            model.state_dict()


def case_dropout_keeps_the_ranks_of_a_tensor_group_equal(directory):
    with job(ddp=True, tensor_parallel_degree=2):
        with smp.tensor_parallelism():
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 4))
        model = smp.DistributedModel(module)
        torch.manual_seed(smp.rank())
        model(own(rows())).square().mean().backward()
        for name in ("2.weight", "2.bias"):
            values = smp.allgather(module.get_parameter(name).grad, smp.CommGroup.TP_GROUP)
            assert torch.equal(*values) and values[0].abs().sum() > 0


class Opaque:
    def __init__(self, x):
        self.x = x


def case_backward_passes_that_would_not_average_are_errors(directory):
    for layout in ({"tensor_parallel_degree": 2}, {}):
        with job(ddp=True, fp16=True, **layout):
            with smp.tensor_parallelism():
                model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
            with pytest.raises(RuntimeError, match=r"loss\.backward\(\) outside of a step under 'fp16'.*@smp\.step"):
                model(own(rows())).sum().backward()
            with torch.no_grad():
                model(own(rows()))
        with job(ddp=True, **layout):
            with smp.tensor_parallelism():
                net = Net()
            net.forward = lambda x, net=net: Opaque(net.inner(x))
            model = smp.DistributedModel(net)
            with pytest.raises(TypeError, match="returned a Opaque outside of a step: expected tensors in tuples"):
                model(own(rows()))
    with job(ddp=True, tensor_parallel_degree=2):
        model, _ = wrapped()
        with pytest.raises(ValueError, match=r"argument 0 has the shapes \(2, 4\), \(2, 5\)"):
            model(torch.ones(2, 4 + smp.tp_rank()))
    with job(ddp=True, tensor_parallel_degree=2, prescaled_batch=True):
        model, _ = wrapped()
        with pytest.raises(ValueError, match="x differs between the ranks 0 and 1"):
            model(x=torch.full((2, 4), float(smp.tp_rank())))
