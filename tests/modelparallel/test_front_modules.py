"""Checkpointing of activations, creation contexts and optimizers: one process, no group."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from smddp.modelparallel import activation, creation
from smddp.modelparallel.optim.optimizers import FusedLAMB, FusedNovoGrad
from torch import nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        return torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)


def trained(layers, x):
    torch.manual_seed(1)
    loss = layers(x).square().sum()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_a_checkpointed_sequential_computes_twice_and_gives_the_same_gradients(strategy):
    torch.manual_seed(0)
    layers, x = nn.Sequential(*[Counting() for _ in range(3)]), torch.randn(2, 3, requires_grad=True)
    expected = trained(layers, x)
    layers.zero_grad()
    names = list(layers.state_dict())
    activation.set_activation_checkpointing(layers, strategy=strategy)
    activation.set_activation_checkpointing(layers, strategy=strategy)
    found = trained(layers, x)
    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
    assert [layer.calls for layer in layers] == [3, 3, 3]
    assert list(layers.state_dict()) == names


def test_checkpoint_calls_a_module_and_a_sequential():
    module, x = Counting(), torch.randn(2, 3, requires_grad=True)
    activation.checkpoint(module, x).sum().backward()
    assert module.calls == 2
    layers = nn.Sequential(Counting(), Counting())
    activation.checkpoint_sequential(layers, x, strategy="contiguous").sum().backward()
    assert [layer.calls for layer in layers] == [2, 2]


@pytest.mark.parametrize(
    ("module", "strategy", "error", "text"),
    [
        (nn.Sequential(nn.ReLU()), "pairs", ValueError, "'each', 'contiguous' or 'group_N'"),
        (nn.Linear(1, 1), "contiguous", ValueError, r"is for a torch\.nn\.Sequential, not Linear"),
    ],
)
def test_unsupported_checkpointing_is_named(module, strategy, error, text):
    with pytest.raises(error, match=text):
        activation.set_activation_checkpointing(module, strategy=strategy)


def test_creation_contexts_set_the_dtype_and_delay_parameters():
    with creation.model_creation(dtype=torch.bfloat16, zero_init=True), creation.delay_param_initialization(False):
        assert nn.Linear(1, 1).weight.dtype == torch.bfloat16
    assert nn.Linear(1, 1).weight.dtype == torch.float32
    with creation.delay_param_initialization():
        assert nn.Linear(1, 1).weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


def lamb(p, g, m, v, step, lr=0.1, b1=0.9, b2=0.999, eps=1e-6, decay=0.01):
    """LAMB as its paper writes it, on lists of numbers."""
    m = [b1 * a + (1 - b1) * b for a, b in zip(m, g)]
    v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g)]
    update = [(a / (1 - b1**step)) / (math.sqrt(b / (1 - b2**step)) + eps) + decay * c for a, b, c in zip(m, v, p)]
    ratio = math.sqrt(sum(a * a for a in p)) / math.sqrt(sum(a * a for a in update))
    return [a - lr * ratio * b for a, b in zip(p, update)], m, v


def novograd(p, g, m, norm, step, lr=0.1, b1=0.9, b2=0.999, eps=1e-8, decay=0.01):
    length = math.sqrt(sum(a * a for a in g))
    norm = length if norm is None else math.sqrt(b2 * norm**2 + (1 - b2) * length**2)
    m = [b1 * a + (1 - b1) * b for a, b in zip(m, g)]
    divisor = norm / math.sqrt(1 - b2**step) + eps
    return [a - lr * ((b / (1 - b1**step)) / divisor + decay * a) for a, b in zip(p, m)], m, norm


def test_lamb_and_novograd_step_as_their_formulas_say():
    gradients = [[0.3, -0.2, 0.1], [0.5, 0.4, -0.9], [3.0, -4.0, 0.0]]
    of_lamb = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    of_novograd = nn.Parameter(of_lamb.detach().clone())
    first, second = FusedLAMB([of_lamb], lr=0.1), FusedNovoGrad([of_novograd], lr=0.1, weight_decay=0.01)
    p, m, v = [1.0, -2.0, 3.0], [0.0] * 3, [0.0] * 3
    q, n, norm = list(p), [0.0] * 3, None
    for step, gradient in enumerate(gradients, 1):
        of_lamb.grad, of_novograd.grad = torch.tensor(gradient), torch.tensor(gradient)
        first.step()
        second.step()
        length = max(1.0, math.sqrt(sum(a * a for a in gradient)))
        p, m, v = lamb(p, [a / length for a in gradient], m, v, step)
        q, n, norm = novograd(q, gradient, n, norm, step)
        torch.testing.assert_close(of_lamb.detach(), torch.tensor(p), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_novograd.detach(), torch.tensor(q), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="amsgrad"):
        FusedLAMB([of_lamb], amsgrad=True)
    with pytest.raises(ValueError, match="norm_type"):
        FusedNovoGrad([of_lamb], norm_type=1)


def test_the_tensorflow_module_explains_why_it_is_missing():
    with pytest.raises(ImportError, match=r"get_gradients.*smdistributed\.dataparallel"):
        import smdistributed.modelparallel.tensorflow  # noqa: F401


def test_the_version_is_read_without_torch():
    code = "import sys, smdistributed.modelparallel as smp; print(smp.__version__, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["1.15.0", "False"]
