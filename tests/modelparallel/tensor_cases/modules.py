"""Modules of a script's own: what is shared of them, what stays whole and why, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import logging

import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from smddp.modelparallel.tensor.split import split_of
from tensor_cases.families import LAYOUTS, same_gradients
from torch import nn


@contextlib.contextmanager
def captured_log():
    """Capture the log lines of the library."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("smddp.modelparallel")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.odd = nn.Embedding(7, 8)
        self.wide = nn.Linear(8, 6)
        self.narrow = nn.Linear(6, 3)
        self.last = nn.Linear(3, 5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight
        with smp.tensor_parallelism(enabled=False):
            self.kept = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.table(ids) + self.odd(ids % 7)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.kept(self.other(torch.tanh(self.one(x))))
        return self.last(torch.tanh(self.narrow(torch.tanh(self.wide(x)))))


@smp.step
def step(model, ids, weights):
    found = model(ids)
    loss = (found * weights).square().mean()
    model.backward(loss)
    return loss, found, {"size": len(found)}


def against_one_process(make, layout, function, data, prepare=lambda module: None):
    """Results and gradients of one step are those of one process; returns the model."""
    torch.manual_seed(0)
    module = make()
    alone = copy.deepcopy(module)
    found = [function.__wrapped__(_Alone(alone), *parts) for parts in zip(*(x.chunk(4) for x in data))]
    wanted = torch.cat([results.detach() for _, results, *_ in found])
    with job(tensor_parallel_degree=2, **layout):
        prepare(module)
        with captured_log() as lines:
            model = smp.DistributedModel(module)
        own = [x.chunk(smp.dp_size())[smp.dp_rank()] for x in data]
        loss, results, *_ = function(model, *own)
        torch.testing.assert_close(results.concat(), wanted.chunk(smp.dp_size())[smp.dp_rank()], rtol=1e-5, atol=1e-6)
        losses = torch.tensor(smp.allgather(loss.reduce_mean().item()))
        mean = torch.stack([value.detach() for value, *_ in found]).mean()
        torch.testing.assert_close(losses.mean(), mean, rtol=1e-6, atol=0)
        same_gradients(model, {name: q.grad for name, q in alone.named_parameters()})
    return model, lines


class _Alone:
    def __init__(self, model):
        self.model = model

    def __call__(self, *args):
        return self.model(*args)

    def backward(self, loss):
        (loss / 4).backward()


def case_linear_and_embedding_modules_are_shared_where_that_changes_nothing(directory):
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 12, (8, 6), generator=generator), torch.randn(8, 6, 5, generator=generator)
    for layout in LAYOUTS:
        model, lines = against_one_process(Net, layout, step, data, smp.set_tensor_parallelism)
        found = {name for name, q in model.get_module().named_parameters() if split_of(q) is not None}
        # Made outside of a context, `kept` is marked by the call, too.
        assert found == {"table.weight", "wide.weight", "wide.bias", "narrow.weight", "kept.weight", "kept.bias"}
        reasons = {
            "odd": "7 rows do not divide by 2",
            "last": "neither 3 nor 5 features divide by 2",
            "attention": "MultiheadAttention uses the weights of its submodules directly",
            "one": "another module has the same weight",
        }
        for name, why in reasons.items():
            assert any(f" {name} stays whole" in line and why in line for line in lines), (name, lines)
        assert isinstance(model.module.wide, smp.nn.DistributedLinear) and isinstance(model.module.wide, nn.Linear)
        assert isinstance(model.module.table, smp.nn.DistributedEmbedding)
        assert not isinstance(model.module.last, smp.nn.DistributedLinear)
        assert list(model.distributed_modules) == [
            model.module.get_submodule(n) for n in ("table", "wide", "narrow", "kept")
        ]
        assert model.is_distributed_parameter(model.module.wide.weight)
        assert not model.is_distributed_parameter(model.module.odd.weight)


def case_a_module_made_in_a_disabled_context_is_not_shared(directory):
    with job(tensor_parallel_degree=4):
        with smp.model_creation(tensor_parallelism=True, fused_softmax=True):
            module = Net()
        model = smp.DistributedModel(module)
        assert {name for name, q in module.named_parameters() if split_of(q) is not None} == {
            "table.weight",
            "wide.weight",
        }
        assert not model.is_distributed_parameter(module.kept.weight)
        names = [name for name, _ in model.scaled_batch_reducer_named_parameters()]
        assert names == [name for name, _ in model.local_named_parameters()]
        assert not list(model.default_reducer_named_parameters())


class Decoder(nn.Module):
    """The original's layers in a model of a script."""

    def __init__(self):
        super().__init__()
        sizes = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 32}
        none = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        self.encoder = smp.nn.DistributedTransformer(2, **sizes, **none, activation="relu", pre_layernorm=True)
        self.decoder = smp.nn.DistributedTransformerLMHead(
            2,
            vocab_size=12,
            num_positions=6,
            num_token_types=2,
            causal_mask_size=6,
            add_cross_attention=True,
            use_normal_initialization=True,
            initializer_range=0.2,
            pre_layernorm=True,
            post_layernorm=False,
            **sizes,
            **none,
        )

    def forward(self, ids, states):
        mask = (ids == 0).long()
        states, _ = self.encoder((states, mask[:, None, None] * -10000.0))
        loss, logits = self.decoder((ids, mask, ids % 2, None, states, mask, ids))
        return loss, logits


@smp.step
def decode(model, ids, states):
    loss, logits = model(ids, states)
    model.backward(loss)
    return loss, logits


def case_the_original_s_layers_are_shared_and_compute_what_they_compute_alone(directory):
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 12, (8, 6), generator=generator), torch.randn(8, 6, 16, generator=generator)
    for layout in LAYOUTS:
        model, _ = against_one_process(Decoder, layout, decode, data)
        for name, q in model.get_module().named_parameters():
            whole = (
                "layernorm" in name
                or "position" in name
                or "token_type" in name
                or name.endswith(("dense.bias", "dense2.bias"))
            )
            assert whole == (split_of(q) is None), name


class Projection(nn.Module):
    def __init__(self, size, of=2):
        super().__init__()
        self.inner = nn.Linear(size, size * of)

    def forward(self, x, scale):
        return {"found": self.inner(x) * scale}


def case_a_registered_class_gives_its_place_to_the_distributed_module(directory):
    smp.tp_register_with_module(
        Projection,
        smp.nn.DistributedLinear,
        init_hook=lambda size, of=2: ((size, size * of), {}),
        forward_hook=lambda x, scale: ((x * scale,), {}),
        return_hook=lambda found: {"found": found},
    )
    with job(tensor_parallel_degree=2, ddp=True):
        torch.manual_seed(smp.rank())
        with smp.tensor_parallelism(bias=False):
            marked = Projection(4)
        module = nn.ModuleDict({"marked": marked, "plain": Projection(4)})
        model = smp.DistributedModel(module)
        assert type(module["plain"]) is Projection and isinstance(module["marked"], smp.nn.DistributedLinear)
        assert module["marked"].bias is None and tuple(module["marked"].weight.shape) == (4, 4)

        @smp.step
        def step(model, x):
            found = model.get_module()["marked"](x, 2.0)["found"]
            model.backward(found.sum())
            return found

        weight = model.state_dict()["marked.weight"]
        x = torch.full((2, 4), float(smp.rank()))
        torch.testing.assert_close(step(model, x).concat(), 2.0 * x @ weight.t())
