"""`tsm.verify`: reports incorrect plans, with wrong outputs or only wrong gradients; accepts correct plans."""

import smddp.sagemaker as tsm
import torch
from ranks.errors import refused
from smp_cases.models import tiny
from smp_cases.tensor_parallel import MY_PLAN, initialized, mine
from torch import nn

SAMPLES = torch.randn((2, 5, 32), generator=torch.Generator().manual_seed(3))


class Tempered(nn.Module):
    """An MLP with a factor for all columns between its projections."""

    def __init__(self):
        super().__init__()
        self.up, self.temper, self.down = nn.Linear(32, 64), Factor(), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.temper(torch.relu(self.up(x))))


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Attention(nn.Module):
    """q, k and v in one weight with an unknown name; ``heads``: the number of heads is fixed in the forward."""

    def __init__(self, heads=None):
        super().__init__()
        self.project, self.out, self.fixed = nn.Linear(32, 96), nn.Linear(32, 32), heads

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.fixed or -1, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def raises(model, plan, *words):
    """Asserts that every rank raises the error, with ``words`` and the degree."""
    with refused(f"Blocks with tensor_parallel_degree={tsm.state.tp_size}", *words):
        tsm.verify(model, SAMPLES, config={"tp_plan": plan})


def case_right_plans_pass_before_and_after_transform():
    for degree in (2, 4):
        with initialized(tensor_parallel_degree=degree):
            for family in ("gpt2", "mixtral")[: 4 // degree]:
                model = tiny(family)
                before = [parameter.clone() for parameter in model.parameters()]
                assert tsm.verify(model) < 1e-5
                assert all(map(torch.equal, before, model.parameters())) and model.training
                model = tsm.transform(model)
                assert tsm.verify(model) < 1e-5
                assert model.training and all(parameter.grad is None for parameter in model.parameters())
            ids = torch.arange(12).view(2, 6)
            assert tsm.verify(mine(), ids, config={"tp_plan": MY_PLAN}) < 1e-5
            assert tsm.verify(mine(), (ids,), config={"tp_plan": MY_PLAN}) < 1e-5
    with initialized():
        assert tsm.verify(tiny()) == 0


def case_right_outputs_with_wrong_gradients_are_named():
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    for degree in (2, 4):
        with initialized(tensor_parallel_degree=degree):
            model = Blocks(Tempered(), Tempered())
            words = ("the gradient of blocks.", "temper.weight differs by", "the outputs of all modules agree")
            raises(model, plan, *words, "replicated_with_grad_allreduce")
            named = {**plan, "blocks.*.temper": "replicated_with_grad_allreduce"}
            assert tsm.verify(model, SAMPLES, config={"tp_plan": named}) < 1e-5


def case_heads_that_a_plan_cuts_across_are_named():
    plan = {"blocks.*.project": "colwise", "blocks.*.out": "rowwise"}
    with initialized(tensor_parallel_degree=4):
        raises(Blocks(Attention(), Attention()), plan, "the first module whose output differs is blocks.0.out, by")
        raises(Blocks(Attention(heads=4)), plan, "fails where the whole model runs", "packed_qkv_colwise")


def case_module_modes_are_restored_after_a_difference():
    with initialized(tensor_parallel_degree=2):
        model = tsm.transform(tiny().train())
        model.model.layers[1].eval()
        modes = [module.training for module in model.modules()]
        model.model.layers[0].mlp.register_forward_hook(lambda module, arguments, output: 2 * output)
        with refused("is not the whole model"):
            tsm.verify(model)
        assert [module.training for module in model.modules()] == modes


def case_incomparable_models_raise():
    def says(text, *args, **kwargs):
        with refused(text, kind=(ValueError, TypeError)):
            tsm.verify(*args, **kwargs)

    with initialized(tensor_parallel_degree=2):
        with torch.device("meta"):
            says("on meta", tiny())
        says("not for Blocks: give some", Blocks(Tempered()), config={"tp_plan": MY_PLAN})
        says("must be a dict, a tuple or a tensor, got int", tiny(), 3)
        says("omit config", tsm.transform(tiny()), config={"tp_plan": MY_PLAN})
        says("call verify(model, inputs, config)", tsm.transform(mine(), config={"tp_plan": MY_PLAN}), SAMPLES)
        says("compares in float32", tsm.transform(tiny(), dtype=torch.bfloat16))
