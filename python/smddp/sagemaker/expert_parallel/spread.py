"""Distribution of a model's experts over the expert group; all checks precede all changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from smddp.sagemaker.expert_parallel import balancing
from smddp.sagemaker.expert_parallel.dispatch import dispatcher
from smddp.sagemaker.expert_parallel.experts import Place, SpreadExperts
from smddp.sagemaker.expert_parallel.families import FAMILIES, Family, layers_of_experts
from smddp.sagemaker.expert_parallel.group import this_process
from smddp.sagemaker.expert_parallel.router import Routing, balance
from smddp.sagemaker.expert_parallel.stacks import stacked
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.moe.moe_layer import MoELayer
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel.mixins import extend
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.shards import Reshaped, put, relayout
from smddp.text import divisors


class Spreader:
    """Distribution of one model's experts over ranks, for `transform`.

    Raises:
        ValueError: no supported expert layer, or a number of experts that is not divisible by the degrees.
    """

    def __init__(self, model: nn.Module, config: MoEConfig) -> None:
        self.model, self.config = model, config
        self.group = this_process()
        assert state.mesh is not None  # `transform` has checked that `init` ran
        self.tp = TensorGroup(state.mesh["tensor"]) if state.tp_size > 1 else None
        self.layers = layers_of_experts(model)
        if not self.layers:
            raise ValueError(
                f"MoEConfig: {type(model).__name__} has no layer of experts that torch.sagemaker can spread. Those of "
                f"{', '.join(FAMILIES)} it can; for another model leave MoEConfig out, and expert_parallel_degree at 1"
            )
        for name, layer, family in self.layers:
            self._check(name, layer, family)

    def _check(self, name: str, layer: Any, family: Family) -> None:
        total, degree = _number(layer.experts), self.group.size
        if total % degree:
            raise ValueError(
                f"expert_parallel_degree={degree} does not divide the {total} experts of {name}; these do: "
                f"{divisors(total)}"
            )
        if self.tp is None:
            return
        if not family.cut:
            raise NotImplementedError(
                f"{name}: a MoEConfig for experts with biases is not supported yet under tensor parallelism: leave it "
                "out, so that a tensor group shares the experts, or set tensor_parallel_degree=1 for this model"
            )
        inner = _inner(layer.experts, family)
        if inner % self.tp.size:
            raise ValueError(
                f"tensor_parallel_degree={self.tp.size} does not divide the {inner} columns of an expert of {name}"
            )

    def without_experts(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Removes the distributed experts from a tensor-parallel plan."""
        whole = {name for name, _, _ in self.layers}
        parts = tuple(f"{name}.{part}" for name, _, family in self.layers for part in ("experts", family.router))
        return {
            name: style
            for name, style in entries.items()
            if name not in whole and not any(name == part or name.startswith(f"{part}.") for part in parts)
        }

    def apply(self) -> None:
        """Cut the experts, without communication, and make the layers route and dispatch as configured."""
        for _, layer, family in self.layers:
            self._spread(layer, family)
        balancing.scale_of(self.model)

    def _spread(self, layer: Any, family: Family) -> None:
        total = _number(layer.experts)
        listed = isinstance(layer.experts, nn.ModuleList)
        if listed:
            assert family.listed is not None
            layer.experts = stacked(layer.experts, family.listed, parts=self.tp is not None)
        experts: Any = layer.experts
        names = tuple(name for name, _ in experts.named_parameters(recurse=False))
        for name in names:
            self._cut(experts, name, family, listed)
        seed = self.config.random_seed if self.config.global_token_shuffle else None
        here = total // self.group.size
        chosen = dispatcher(self.group, here, self.config.moe_all_to_all_dispatcher, seed)
        extend(experts, SpreadExperts)._ep = Place(family, names, chosen, self.tp)
        balance(layer, Routing(family, self.config), listed)
        extend(layer, MoELayer, first=False)

    def _cut(self, experts: nn.Module, name: str, family: Family, listed: bool) -> None:
        """Shards parameter ``name`` to this rank's experts, and to its tensor rank's columns."""
        meshes, placements = self._mesh(), []
        if meshes is None:
            return
        parameter = experts.get_parameter(name)
        if self.tp is not None:
            dim, parts = family.cut[name]
            if parts > 1:
                if not listed:
                    shape = parameter.shape
                    inside = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
                    relayout(experts, Reshaped(name, shape, inside))
                    parameter = experts.get_parameter(name)
                dim += 1
        mine = parameter.detach()
        if self.group.size > 1:
            mine = mine.chunk(self.group.size, 0)[self.group.rank]
            placements.append(Shard(0))
        if self.tp is not None:
            mine = mine.chunk(self.tp.size, dim)[self.tp.rank]
            placements.append(Shard(dim))
        mine = mine.clone(memory_format=torch.contiguous_format)  # so that the whole parameter's memory becomes free
        put(experts, name, DTensor.from_local(mine, meshes, placements, run_check=False), parameter)

    def _mesh(self) -> DeviceMesh | None:
        """Returns the device mesh of the experts' DTensors; None if experts are not sharded."""
        if self.group.size == 1:
            return None if self.tp is None else self.tp.mesh
        mesh = state.expert_mesh
        assert mesh is not None  # as the degree is above 1
        return mesh["expert"] if self.tp is None else mesh["expert", "tensor"]


def _number(experts: nn.Module) -> int:
    """Returns the total number of experts over all ranks."""
    return len(experts) if isinstance(experts, nn.ModuleList) else next(experts.parameters()).shape[0]


def _inner(experts: Any, family: Family) -> int:
    """The columns of an expert that a tensor group shares."""
    if isinstance(experts, nn.ModuleList):
        assert family.listed is not None
        return experts[0].get_submodule(family.listed[2]).get_parameter("weight").shape[1]
    return experts.down_proj.shape[family.cut["down_proj"][0]]


def spread_modules(model: nn.Module) -> Iterable[nn.Module]:
    """Returns the modules of ``model`` whose experts are distributed over several ranks."""
    for module in model.modules():
        if isinstance(module, SpreadExperts) and module._ep.dispatcher.group.size > 1:
            yield module
