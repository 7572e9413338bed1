"""The cut itself: what a plan's styles do to the modules of a model, and to parameters that are one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from smddp.sagemaker import hf
from smddp.sagemaker.tensor_parallel.plan import Planner
from smddp.sagemaker.tensor_parallel.regions import TensorGroup


def tied(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are one, in groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def cut(
    model: nn.Module, tp: TensorGroup, planner: Planner, styles: Mapping[str, ParallelStyle], one: list[list[str]]
) -> dict[str, nn.Module]:
    """Share the modules that ``styles`` names, as ``planner`` has made them; returns all modules by name.

    Args:
        one: what `tied` gave before: these parameters are one afterwards, too.
    """
    # One module may have several names, as the embeddings of encoder and decoder in 4.57.
    modules = dict(model.named_modules(remove_duplicate=False))
    # One entry per module, in torch's form; the styles are torch ParallelStyles.
    parallelize_module(model, tp.mesh, dict(styles))
    for adapted in planner.adapted:
        adapted.apply_dropouts()
    for name, heads in planner.heads.of.items():
        hf.localise_heads(hf.as_attention(modules[name]), *heads)
    for name, block in planner.blocks.items():
        block.attach(modules[name])
    for names in one:
        _tie(modules, names)
    return modules


def _tie(modules: dict[str, nn.Module], names: list[str]) -> None:
    """Make the parameters ``names``, which were one, one again: the one that has been shared, if any."""
    of_all = [modules[owner]._parameters[attribute] for owner, _, attribute in (name.rpartition(".") for name in names)]
    parameter = next((parameter for parameter in of_all if isinstance(parameter, DTensor)), of_all[0])
    for name in names:
        owner, _, attribute = name.rpartition(".")
        modules[owner].register_parameter(attribute, parameter)
