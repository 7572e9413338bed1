"""Low-rank adapters of shared layers train as in one process."""

import smddp.sagemaker as tsm
import torch
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.tensor_parallel import TOLERANCE, initialized, whole, wrapped

RANK = 4


class Adapter(torch.nn.Module):
    """What PEFT puts in the place of a projection (x, in) -> (x, out)."""

    def __init__(self, base: torch.nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        transposed = not isinstance(base, torch.nn.Linear)
        rows, columns = reversed(base.weight.shape) if transposed else base.weight.shape
        self.base_layer = base
        self.lora_dropout = torch.nn.ModuleDict({"default": torch.nn.Dropout(dropout)})
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(columns, RANK, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(RANK, rows, bias=False)})

    def forward(self, x):
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + 0.5 * self.lora_B["default"](low)


def adapted(family: str = "llama", only: tuple[str, ...] = (), dropout: float = 0.0, **overrides):
    """A tiny model with an adapter around every projection (or those whose names end as ``only``), the rest frozen."""
    model = tiny(family, **overrides)
    model.requires_grad_(False)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "c_attn", "c_proj", "lm_head")
    torch.manual_seed(2)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in (only or names):
            setattr(model.get_submodule(parent), last, Adapter(module, dropout))
    return model


def assert_same_gradients(plain, model):
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    for name, gradient in wanted.items():
        gap = (gradient - found[name].view(gradient.shape)).abs().max().item()
        assert gap < TOLERANCE, (name, gap)


def case_adapters_of_shared_layers_have_the_gradients_of_one_process():
    rows = [
        (2, "llama", {}, {}),
        (4, "llama", {}, {}),  # fewer key and value heads than ranks
        (2, "llama", {}, {"sequence_parallel": True}),
        (4, "llama", {}, {"sequence_parallel": True}),
        (2, "gpt2", {}, {}),
        (2, "llama", {"dropout": 0.3, "only": ("q_proj", "v_proj", "gate_proj")}, {}),
    ]
    for degree, family, adapters, config in rows:
        with initialized(tensor_parallel_degree=degree):
            plain, model = adapted(family, **adapters).train(), adapted(family, **adapters).train()
            model = tsm.transform(model, config=config or None)
            losses = []
            for each in (plain, model):
                torch.manual_seed(5)  # of the dropouts
                losses.append(loss_of(each, batch(0)))
                losses[-1].backward()
            gap = abs(losses[0].item() - losses[1].item())
            assert gap < TOLERANCE, (degree, family, adapters, config, gap)
            assert_same_gradients(plain, model)


def case_adapters_of_shared_layers_train_under_fully_shard():
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2):
        plain, model = adapted(), wrapped(tsm.transform(adapted()), "fsdp2")
        loss_of(plain, batch(0)).backward()
        loss_of(model, part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)).backward()
        assert_same_gradients(plain, model)


def case_adapters_of_another_form_are_refused_with_what_runs():
    with initialized(tensor_parallel_degree=2):
        model = adapted(only=("q_proj",))
        adapter = model.model.layers[1].self_attn.q_proj
        adapter.lora_magnitude_vector = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.ones(32))})
        try:
            tsm.transform(model)
        except NotImplementedError as error:
            assert "model.layers.1.self_attn.q_proj" in str(error) and "without DoRA" in str(error), error
        else:
            raise AssertionError("no error")


class Prompted(torch.nn.Module):
    """What PEFT makes of a model whose prompts it trains."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.prompts = model, torch.nn.Embedding(4, 32)

    def get_base_model(self):
        return self.model


def case_parameters_of_the_wrapper_itself_are_refused():
    with initialized(tensor_parallel_degree=2):
        try:
            tsm.transform(Prompted(tiny()))
        except NotImplementedError as error:
            assert "Prompted: prompts.weight is no parameter of the model" in str(error), error
        else:
            raise AssertionError("no error")
