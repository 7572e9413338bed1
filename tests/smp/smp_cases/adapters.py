"""Parity of low-rank adapters of sharded layers with one process."""

import warnings

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.tensor_parallel import TOLERANCE, initialized, values, whole, wrapped
from torch.distributed.tensor import DTensor

RANK = 4


class Adapter(torch.nn.Module):
    """Equivalent of PEFT's adapter of a projection (x, in) -> (x, out)."""

    def __init__(self, base: torch.nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        weight = self.base_layer.weight
        # As PEFT reads sizes: those of this rank's part where a Linear's weight is a DTensor.
        linear = isinstance(base, torch.nn.Linear)
        rows, columns = getattr(weight, "to_local", lambda: weight)().shape if linear else reversed(weight.shape)
        self.lora_dropout = torch.nn.ModuleDict({"default": torch.nn.Dropout(dropout)})
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(columns, RANK, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(RANK, rows, bias=False)})

    def forward(self, x):
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + 0.5 * self.lora_B["default"](low)


def adapt(model: torch.nn.Module, only: tuple[str, ...] = (), dropout: float = 0.0):
    """``model`` with an adapter around every projection (or those whose names end as ``only``), the rest frozen."""
    model.requires_grad_(False)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "c_attn", "c_proj", "lm_head")
    torch.manual_seed(2)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in (only or names):
            setattr(model.get_submodule(parent), last, Adapter(module, dropout))
    return model


def adapted(family: str = "llama", only: tuple[str, ...] = (), dropout: float = 0.0, **overrides):
    """A tiny model with adapters."""
    return adapt(tiny(family, **overrides), only, dropout)


def both_orders(family: str = "llama", config: dict | None = None, **adapters):
    """A function for each order in which a model gets adapters and is shared."""
    yield lambda: tsm.transform(adapted(family, **adapters), config=config)
    yield lambda: adapt(tsm.transform(tiny(family), config=config), **adapters)


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
    for number, (degree, family, adapters, config) in enumerate(rows):
        with initialized(tensor_parallel_degree=degree):
            orders = list(both_orders(family, config or None, **adapters))
            # Both of llama at both degrees, which differ most; then by turns.
            for order in orders if number < 2 else orders[number % 2 :][:1]:
                plain, model = adapted(family, **adapters).train(), order().train()
                losses = []
                for each in (plain, model):
                    torch.manual_seed(5)  # of the dropouts
                    losses.append(loss_of(each, batch(0)))
                    losses[-1].backward()
                gap = abs(losses[0].item() - losses[1].item())
                assert gap < TOLERANCE, (degree, family, adapters, config, gap)
                assert_same_gradients(plain, model)


def case_adapters_of_shared_layers_train_under_fsdp():
    wanted, optimizer = [], torch.optim.SGD
    plain = adapted()
    step = optimizer(plain.parameters(), lr=1.0)
    for i in range(2):
        loss = loss_of(plain, batch(i))
        loss.backward()
        wanted.append(loss.item())
        step.step()
        step.zero_grad()
    for tensor, shard in ((2, 2), (2, 1), (4, 1)):
        with initialized(hybrid_shard_degree=shard, tensor_parallel_degree=tensor):
            for engine in ("fsdp1", "fsdp2"):
                for order in list(both_orders())[(tensor, shard) != (2, 2) :]:  # the former once
                    model = wrapped(order(), engine)
                    step = optimizer([p for p in model.parameters() if p.requires_grad], lr=1.0)
                    losses = []
                    for i in range(2):
                        loss = loss_of(model, part_of(batch(i), tsm.state.dp_rank, tsm.state.dp_size))
                        loss.backward()
                        losses.append(loss.item())
                        step.step()
                        step.zero_grad()
                    mean = torch.tensor(losses)
                    dist.all_reduce(mean)
                    mean /= dist.get_world_size()
                    layout = (tensor, shard, engine)
                    assert torch.allclose(mean, torch.tensor(wanted), atol=TOLERANCE), (layout, mean, wanted)
                    # The learning rate is 1: what parameters moved is what gradients were.
                    found = values(model)
                    for name, parameter in plain.named_parameters():
                        gap = (found[name] - parameter).abs().max().item()
                        assert gap < TOLERANCE, (tensor, shard, engine, name, gap)


def case_adapters_that_come_after_transform_are_the_first_ranks_and_dtensors():
    with initialized(tensor_parallel_degree=2):
        plain, model = adapted(only=("q_proj", "o_proj")), tsm.transform(tiny())
        seeds = torch.manual_seed
        torch.manual_seed = lambda seed: seeds(seed + tsm.state.tp_rank)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                adapt(model, only=("q_proj", "o_proj"))
        finally:
            torch.manual_seed = seeds
        assert any("adapters differed within a tensor group" in str(warning.message) for warning in said)
        found = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in found.values())
        for name, parameter in plain.named_parameters():
            assert torch.equal(whole(found[name]), parameter), name


def case_frozen_units_that_fsdp1_does_not_shard_are_in_state_dicts_after_a_pass():
    wanted = adapted(only=("q_proj",)).state_dict()
    for tensor in (4, 1):
        with initialized(hybrid_shard_degree=1, tensor_parallel_degree=tensor):
            model = wrapped(tsm.transform(adapted(only=("q_proj",))), "fsdp1")
            for _ in range(2):
                loss_of(model, batch(0)).backward()
                found = model.state_dict()  # a frozen embedding and head are in the outermost unit
                assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
                for name, value in wanted.items():
                    assert torch.equal(whole(found[name]), value), (tensor, name)


class EmbeddingAdapter(torch.nn.Module):
    """Equivalent of PEFT's adapter of an embedding."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_embedding_A = torch.nn.ParameterDict({"default": torch.randn(RANK, base.num_embeddings)})
        self.lora_embedding_B = torch.nn.ParameterDict({"default": torch.randn(base.embedding_dim, RANK)})

    def forward(self, ids):
        low = torch.nn.functional.embedding(ids, self.lora_embedding_A["default"].T)
        return self.base_layer(ids) + low @ self.lora_embedding_B["default"].T


def case_adapters_of_an_embedding_that_every_rank_holds_have_the_gradients_of_one_process():
    def adapt(model):
        model.requires_grad_(False)
        torch.manual_seed(2)
        model.model.embed_tokens = EmbeddingAdapter(model.model.embed_tokens)
        return model

    with initialized(tensor_parallel_degree=2):
        for model in (tsm.transform(adapt(tiny())), adapt(tsm.transform(tiny()))):
            plain = adapt(tiny())
            for each in (plain, model):
                loss_of(each, batch(0)).backward()
            assert_same_gradients(plain, model)


def case_adapters_that_come_after_transform_load_whole_values():
    for family, degree, names in (("llama", 4, ("k_proj", "o_proj", "lm_head")), ("gpt2", 2, ("c_attn", "c_proj"))):
        with initialized(tensor_parallel_degree=degree):
            model = adapt(tsm.transform(tiny(family)), names)
            saved = {name: t + 0.1 for name, t in adapted(family, names).state_dict().items() if "lora_" in name}
            assert not model.load_state_dict(saved, strict=False).unexpected_keys
            found = values(model)
            assert all(torch.equal(found[name], value) for name, value in saved.items()), (family, degree)


def fails(kind, build, *words: str):
    with refused(*words, kind=kind):
        build()


def case_unsupported_adapters_after_transform_are_rejected_on_creation():
    class Reading(Adapter):
        """Adapter initialised from the projection's values, like PiSSA."""

        def __init__(self, base):
            super().__init__(base)
            self.lora_A["default"].weight.data = torch.linalg.svd(self.base_layer.weight.data)[2][:RANK]

    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2):
        model = tsm.transform(tiny())
        attention = model.model.layers[1].self_attn
        before = attention.q_proj
        fails(NotImplementedError, lambda: setattr(attention, "q_proj", Reading(before)), "PiSSA", "linalg_svd")
        assert attention.q_proj is before
        loss_of(model, batch(0)).backward()  # as if nothing had been
        attention.q_proj = Adapter(before)
        second = torch.nn.Linear(32, RANK)
        fails(NotImplementedError, lambda: attention.q_proj.lora_A.update({"second": second}), "adapter 'second'")
        for engine in ("fsdp1", "fsdp1_flat", "fsdp2"):
            layer = wrapped(tsm.transform(tiny()), engine).model.layers[1].self_attn
            fails(ValueError, lambda layer=layer: Adapter(layer.v_proj), "transform(), get_peft_model() and FSDP")


def case_unsupported_adapters_are_rejected_with_alternatives():
    with initialized(tensor_parallel_degree=2):
        model = adapted(only=("q_proj",))
        words = ("model.layers.1.self_attn.q_proj is a", "without DoRA")
        with_magnitudes(model.model.layers[1].self_attn.q_proj)
        fails(NotImplementedError, lambda: tsm.transform(model), *words)
        attention = tsm.transform(tiny()).model.layers[1].self_attn
        adapter = with_magnitudes(Adapter(attention.q_proj))
        fails(NotImplementedError, lambda: setattr(attention, "q_proj", adapter), *words)


def with_magnitudes(adapter):
    adapter.lora_magnitude_vector = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.ones(32))})
    return adapter


class Prompted(torch.nn.Module):
    """Equivalent of PEFT's wrapper for prompt tuning."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.prompts = model, torch.nn.Embedding(4, 32)

    def get_base_model(self):
        return self.model


def case_parameters_of_the_wrapper_are_rejected():
    with initialized(tensor_parallel_degree=2):
        words = "Prompted: prompts.weight is outside the model"
        fails(NotImplementedError, lambda: tsm.transform(Prompted(tiny())), words)
