"""Names that published scripts of SMP v1 import, read or call, by import path, and further names of models."""

from __future__ import annotations

import copy
import importlib
import pickle

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
        load_optimizer_backcompat clip_master_grads step zero_grad loss_scale overflow""",
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


def test_model_with_further_names_is_copied_and_pickled():
    net = nn.Sequential(nn.Linear(2, 2))
    alias.add_aliases(net)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert again.module.module[0] is again[0] is not net[0]


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_every_module_of_a_list_is_checkpointed(kind):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    if kind is nn.ModuleDict:
        layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
    activation.set_activation_checkpointing(layers, strategy="group_2")
    assert [CHECKPOINTED in layer.__dict__ for layer in layers.children()] == [True, True]
    assert CHECKPOINTED not in layers.__dict__
