"""Comparison of replicas before the first step: ranks that hold copies of a parameter must hold the same values.

Hybrid sharding averages gradients over replicas and never compares their parameters. Models that ranks created from
different seeds would differ for ever. The check runs before the first step, when parameters that were on the meta
device have their values and checkpoints are loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from smddp.sagemaker.checksum import LIMIT, checksum
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.private_names import handle_of
from smddp.sagemaker.state_handler import state
from smddp.text import named_ranks

# Stands for a parameter that a rank does not compare.
_NONE = -1
Copy = tuple[dist.ProcessGroup, str, "torch.Tensor | None"]


class DifferentReplicas(RuntimeError):
    """Ranks that hold copies of the same parameter hold different values before the first step."""


class Unchecked:
    """Wrapped modules whose replicas have not been compared yet."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._added = 0
        # By optimizer: modules that had been added when it was checked.
        self._checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def add(self, module: nn.Module) -> None:
        """Register ``module``, wrapped by FSDP over `tsm.state.mesh`, for the comparison before the first step."""
        self._modules.append(weakref.ref(module))
        self._added += 1

    def clear(self) -> None:
        """Forgets all modules."""
        self._modules.clear()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares the modules of which ``optimizer`` holds a parameter, once. Collective over all ranks.

        Raises DifferentReplicas on every rank, with the ranks that differ and the first parameter.
        """
        if self._checked.get(optimizer) == self._added or not self._modules:
            return
        if not any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            return  # checkpoints make an optimizer's state by a step at rate zero, before they load values
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules: list[nn.Module] = []
        rest: list[nn.Module] = []
        for reference in self._modules:
            module = reference()
            if module is not None:
                trains = any(id(parameter) in held for parameter in module.parameters())
                (modules if trains else rest).append(module)
        if modules:
            # The outermost module was wrapped last, and has the full names.
            _compare(list(_copies(modules[::-1])))
        # Not before: a step after an error compares again.
        self._modules = [weakref.ref(module) for module in rest]
        self._checked[optimizer] = self._added


def _copies(modules: list[nn.Module]) -> Iterator[Copy]:
    """(group of the replicas, name, this rank's values or None) of every parameter, each once per group."""
    seen: set[int] = set()
    for module in modules:
        for prefix, unit in module.named_modules():
            if isinstance(unit, FullyShardedDataParallel) and handle_of(unit) is not None and id(unit) not in seen:
                seen.add(id(unit))
                group = state.replication_process_group
                if group.size() > 1:
                    yield from ((group, f"{prefix}.{name}", values) for name, values in _flattened(unit))
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield from ((group, name, values) for group, values in _of_dtensor(parameter))


def _flattened(unit: FullyShardedDataParallel) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, this rank's values or None) of every parameter that a unit of FSDP1 has flattened."""
    flat = handle_of(unit).flat_param
    for name, info in zip(flat._fqns, flat._shard_param_infos):
        if info.in_shard:
            assert info.offset_in_shard is not None and info.numel_in_shard is not None  # as it is in the shard
            yield name, flat.data[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        else:
            yield name, None


def _of_dtensor(parameter: nn.Parameter) -> Iterator[tuple[dist.ProcessGroup, torch.Tensor | None]]:
    """(group, this rank's values) for each dimension of the mesh along which ranks hold copies of a DTensor."""
    if not isinstance(parameter, DTensor):
        return
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and parameter.device_mesh.size(dim) > 1:
            local = parameter.to_local()
            yield parameter.device_mesh.get_group(dim), None if local.is_meta else local


def _compare(copies: list[Copy]) -> None:
    assert state.mesh is not None  # modules are registered after `init`
    device = state.mesh.device_type
    by_group: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
    for group, name, values in copies:
        sum_ = torch.tensor(_NONE) if values is None else checksum(values)
        by_group.setdefault(group, []).append((plain_name(name), sum_.to(device)))
    texts = []
    for group, named in by_group.items():
        sums = torch.stack([each for _, each in named])
        if bool(_differ(sums, group).any()):
            texts.append(_text(named, sums, group))
    failed = torch.tensor([float(len(texts))], device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if bool(failed):
        of_all: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_all, texts)
        raise DifferentReplicas(next(text for found in of_all for text in found))


def _differ(sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """bool (parameters,): True where ranks of ``group`` have different sums."""
    most = torch.stack([sums, torch.where(sums == _NONE, sums, LIMIT - sums)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return (most[0] != _NONE) & (most[0] + most[1] != LIMIT)


def _text(named: list[tuple[str, torch.Tensor]], sums: torch.Tensor, group: dist.ProcessGroup) -> str:
    of_all = sums.new_empty(group.size() * len(sums))
    dist.all_gather_into_tensor(of_all, sums, group=group)
    of_all = of_all.view(group.size(), -1)
    differs = (of_all != of_all[0]).any(0).nonzero().flatten().tolist()
    ranks_of: dict[int, list[int]] = {}
    for rank, value in zip(dist.get_process_group_ranks(group), of_all[:, differs[0]].tolist()):
        ranks_of.setdefault(value, []).append(rank)
    groups = " and ".join(map(named_ranks, ranks_of.values()))
    return (
        f"replicas differ before the first step: {groups} hold different values of parameter {named[differs[0]][0]!r} "
        f"({len(differs)} of {len(named)} parameters differ), and only their gradients are averaged. Create the model "
        "from the same seed on every rank (torch.manual_seed(seed)) and seed by tsm.state.dp_rank afterwards, or load "
        "the same checkpoint on every rank after wrapping"
    )
