"""Names that published scripts of SMP v1 import, read or call, by import path, and further names of models."""

from __future__ import annotations

import copy
import importlib
import pickle
import pickletools

import pytest
import torch
from smddp.modelparallel import activation, alias
from smddp.modelparallel.names import keep
from smddp.modelparallel.partitioning.partition import CHECKPOINTED
from torch import nn

GROUPS = "WORLD MP_GROUP DP_GROUP TP_GROUP PP_GROUP RDP_GROUP"
RANKS = "WORLD_RANK MP_RANK DP_RANK TP_RANK PP_RANK RDP_RANK"
OF_FAMILY = """translate_state_dict_to_hf_{0} translate_hf_state_dict_to_smdistributed_{0}
    translate_hf_{0}_state_dict_to_smdistributed translate_hf_{0}_state_dict_to_smdistributed_{0}
    translate_hf_state_dict_to_smdistributed translate_state_dict_to_smdistributed
    translate_hf_block_state_dict_to_smdistributed translate_layer_state_dict_to_hf_{0}_block
    get_hf_{0}_transformer_layer_hooks"""
FAMILIES = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta")

# Paths below smdistributed.modelparallel.
NAMES = {
    "torch": f"{GROUPS} {RANKS} CommGroup RankType state_mod utils state nn amp optimizers patches model step",
    "torch.state_mod": "state",
    "torch.utils": "get_distribution_axis rmsg",
    "torch.nn": "huggingface FlashAttentionLayer DistributedTransformerLayer FusedLayerNorm",
    "torch.nn.huggingface": " ".join(FAMILIES),
    "test.torch.utils": "dump_model verify",
    **{f"torch.nn.huggingface.{family}": OF_FAMILY.format(family) for family in FAMILIES},
}

METHODS = {
    "DistributedModel": """backward get_module state_dict local_state_dict load_state_dict local_parameters cpu join
        register_comm_hook register_post_partition_hook register_post_step_hook is_distributed_parameter""",
    "DistributedOptimizer": """state_dict local_state_dict load_state_dict orig_state_dict save_optimizer_backcompat
        load_optimizer_backcompat clip_master_grads step zero_grad loss_scale overflow _param_id_to_index
        param_name_to_index redefined_params""",
    "StepOutput": "reduce_mean reduce_sum concat stack",
}


@pytest.mark.parametrize("path", NAMES)
def test_published_names_import(path):
    module = importlib.import_module(f"smdistributed.modelparallel.{path}")
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert not missing


def test_published_methods_exist():
    import smdistributed.modelparallel.torch as smp

    for kind, names in METHODS.items():
        missing = [name for name in names.split() if not hasattr(getattr(smp, kind), name)]
        assert not missing, kind


def test_groups_and_ranks_are_the_members_of_their_enumerations():
    import smdistributed.modelparallel.torch as smp

    assert [getattr(smp, name) for name in GROUPS.split()] == [smp.CommGroup[name] for name in GROUPS.split()]
    assert [getattr(smp, name) for name in RANKS.split()] == [smp.RankType[name] for name in RANKS.split()]
    assert smp.state_mod.state is smp.state


def test_helpers_outside_of_a_job(caplog):
    from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg

    with caplog.at_level("INFO", "smddp.modelparallel"):
        rmsg("loss", 1.5)
    assert get_distribution_axis(nn.Parameter(torch.zeros(1))) is None and "rank ?: loss 1.5" in caplog.text


def test_translators_return_what_they_get_and_layer_hooks_keep_the_layer():
    from smddp.modelparallel.tensor import registry
    from smdistributed.modelparallel.torch.nn.huggingface import gpt2

    values = {"a": torch.zeros(1)}
    assert gpt2.translate_hf_state_dict_to_smdistributed(values, 1024) is values
    hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
    assert hooks == (keep, keep, keep)
    registry.tp_register_with_module(nn.Tanh, nn.Linear, *hooks)
    assert nn.Tanh not in registry._registered


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def unwrapped(model):
    """As transformers before 4.40 unwraps models."""
    return unwrapped(model.module) if hasattr(model, "module") else model


@pytest.mark.parametrize("wrap", [lambda module: module, Wrapper])
def test_module_has_further_levels_that_end(wrap):
    net = nn.Sequential(nn.Linear(2, 2))
    model = wrap(net)
    names = list(model.state_dict())
    alias.add_aliases(model)
    alias.add_aliases(model)
    assert list(model.state_dict()) == names and len(list(model.modules())) == 2 + (model is not net)
    inner = net.module.module
    assert inner[0] is net[0] and list(inner) == list(net)
    assert isinstance(inner, nn.Sequential) and not hasattr(inner, "module")
    assert isinstance(unwrapped(model), nn.Sequential)
    activation.set_activation_checkpointing(inner, strategy="contiguous")
    assert CHECKPOINTED in net.__dict__


class Counted(nn.Linear):
    """Special methods that no torch module has."""

    def __len__(self):
        return 0

    def __matmul__(self, other):
        return "product", other


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    "list": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "dict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "parameters": lambda: nn.ParameterList([torch.ones(2)]),
    "linear": lambda: nn.Linear(2, 2),
    "counted": lambda: Counted(2, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_further_names_have_the_special_methods_of_the_module(name):
    net = MODULES[name]()
    alias.add_aliases(net)
    for inner in (net.module, net.module.module):
        for method in (each for each in dir(type(net)) if each.startswith("__") and callable(getattr(net, each))):
            assert method in dir(type(inner)), method
        assert isinstance(inner, nn.Module) and isinstance(inner, type(net)) and not hasattr(inner, "__missing__")
        assert hasattr(inner, "__len__") is hasattr(net, "__len__") and bool(inner) is bool(net)
        assert inner == net and net == inner and {inner, net} == {net} and inner != nn.Linear(2, 2)
        if hasattr(net, "__len__"):
            assert len(inner) == len(net)
        if hasattr(net, "__iter__"):
            assert list(inner) == list(net) and (next(iter(net)) in inner) is (next(iter(net)) in net)
        if hasattr(net, "__getitem__"):
            key = "a" if name == "dict" else 0
            assert inner[key] is net[key]
            inner[key] = replaced = copy.deepcopy(net[key])
            assert net[key] is replaced
        if name == "sequential":
            assert len(inner[:1]) == 1 and torch.equal(inner(torch.ones(2)), net(torch.ones(2)))
        if name == "counted":
            assert inner @ 3 == ("product", 3)
        inner.extra = 1
        del inner.extra
        assert not hasattr(net, "extra") and dir(inner) == dir(net)


@pytest.mark.parametrize("name", [each for each in MODULES if each != "counted"])
def test_copies_and_pickles_of_further_names_are_plain_modules(name):
    net = MODULES[name]()
    alias.add_aliases(net)
    assert copy.deepcopy(net) is not net and not hasattr(copy.deepcopy(net), "module")
    for inner in (net, net.module, net.module.module):
        for again in (copy.deepcopy(inner), copy.copy(inner), pickle.loads(pickle.dumps(inner))):
            assert type(again) is type(net) and again is not net
            torch.testing.assert_close(again.state_dict(), net.state_dict())
    both = copy.deepcopy({"module": net, "alias": net.module})
    assert both["alias"] is both["module"]
    for value in (net, net.module, {"module": net, "alias": net.module}):
        assert not any("smddp" in str(argument) for _, argument, _ in pickletools.genops(pickle.dumps(value)))


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_every_module_of_a_list_is_checkpointed(kind):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    if kind is nn.ModuleDict:
        layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
    activation.set_activation_checkpointing(layers, strategy="group_2")
    assert [CHECKPOINTED in layer.__dict__ for layer in layers.children()] == [True, True]
    assert CHECKPOINTED not in layers.__dict__
