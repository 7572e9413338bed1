"""Application of a plan: sharding of modules by style, shared parameters, and parameters that differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from smddp.sagemaker import hf
from smddp.sagemaker.tensor_parallel import styles as of_modules
from smddp.sagemaker.tensor_parallel.plan import Planner
from smddp.sagemaker.tensor_parallel.regions import TensorGroup


def tied(model: nn.Module) -> list[list[str]]:
    """Returns the names of tied parameters, in groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def cut(
    model: nn.Module, tp: TensorGroup, planner: Planner, styles: Mapping[str, ParallelStyle], one: list[list[str]]
) -> dict[str, nn.Module]:
    """Shard the modules named in ``styles``, created by ``planner``; returns all modules by name.

    Args:
        one: what `tied` gave before: these parameters are one afterwards, too.
    """
    # One module may have several names, as the embeddings of encoder and decoder in 4.57.
    modules = dict(model.named_modules(remove_duplicate=False))
    # One entry per module, in torch's form; the styles are torch ParallelStyles.
    parallelize_module(model, tp.mesh, dict(styles))
    for name, style in styles.items():
        if isinstance(style, of_modules.Style):
            of_modules.remember(modules[name], name, style)
    for adapted in planner.adapted:
        adapted.apply()
    for name, heads in planner.heads.of.items():
        hf.localise_heads(hf.as_attention(modules[name]), *heads)
    for name, block in planner.blocks.items():
        block.attach(modules[name])
    for names in one:
        _tie(modules, names)
    return modules


def broadcast_if_different(model: nn.Module, tp: TensorGroup) -> list[str]:
    """Broadcast the first rank's values of parameters that differ in the tensor group, and return their names.

    So all ranks shard the same model, also in scripts that create it without a common seed. Skips parameters that are
    already sharded or on meta. Collective over the tensor group.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if not p.is_meta and not isinstance(p, DTensor)]
    if not parameters:
        return []
    mine = torch.stack([p.detach().sum(dtype=torch.float64).cpu() for _, p in parameters]).to(tp.mesh.device_type)
    of_all = mine.new_empty(tp.size * len(parameters))
    dist.all_gather_into_tensor(of_all, mine, group=tp.group)
    differs = (of_all.view(tp.size, -1) != of_all[: len(parameters)]).any(0).tolist()
    different = [named for named, differ in zip(parameters, differs) if differ]
    for _, parameter in different:
        values = parameter.detach().to(tp.mesh.device_type).contiguous()
        dist.broadcast(values, dist.get_global_rank(tp.group, 0), group=tp.group)
        parameter.data.copy_(values)
    return [name for name, _ in different]


def _tie(modules: dict[str, nn.Module], names: list[str]) -> None:
    """Restore the tie between the parameters ``names``, using the sharded parameter, if any."""
    of_all = [modules[owner]._parameters[attribute] for owner, _, attribute in (name.rpartition(".") for name in names)]
    parameter = next((parameter for parameter in of_all if isinstance(parameter, DTensor)), of_all[0])
    for name in names:
        owner, _, attribute = name.rpartition(".")
        modules[owner].register_parameter(attribute, parameter)
