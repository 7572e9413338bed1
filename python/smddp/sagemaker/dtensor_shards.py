"""Sharding of full tensors by DTensor layouts without communication.

Every rank computes the same full value from the same seed, so nothing has to be sent: each keeps its own part.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def cut(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's local part of ``full``, in the layout of ``like``; a copy, so that ``full`` can be freed.

    ``full`` has ``like``'s global shape. Raises `ValueError` where the shapes differ, or where the cut does not
    give the shape that ``like`` holds (a layout this function does not know).
    """
    if full.shape != like.shape:
        raise ValueError(f"a value of shape {tuple(full.shape)} for a DTensor of shape {tuple(like.shape)}")
    return _checked(_cut(full, like, _order(like)), full, like)


def cut_over(full: torch.Tensor, like: DTensor, names: Collection[str]) -> torch.Tensor:
    """Returns this rank's part of ``full`` after sharding over the mesh dimensions ``names``; a view."""
    return _cut(full, like, [dim for dim in _order(like) if _name(like, dim) in names])


def cut_rest(part: torch.Tensor, like: DTensor, names: Collection[str]) -> torch.Tensor:
    """Returns this rank's local part of the result of `cut_over` for the same ``names``; a copy."""
    return _checked(_cut(part, like, [dim for dim in _order(like) if _name(like, dim) not in names]), part, like)


def _name(like: DTensor, dim: int) -> str:
    names = like.device_mesh.mesh_dim_names
    return names[dim] if names else ""


def _cut(local: torch.Tensor, like: DTensor, dims: list[int]) -> torch.Tensor:
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        return local.new_empty(0)
    for mesh_dim in dims:
        placement = like.placements[mesh_dim]
        if placement.is_replicate():
            continue
        # Plain and strided shards have no class in common that every torch has.
        dim: int = placement.dim  # type: ignore[attr-defined]
        parts = local.chunk(like.device_mesh.size(mesh_dim), dim=dim)
        mine = coordinate[mesh_dim]
        # chunk() gives fewer parts than asked where they run out: the ranks after hold none.
        local = parts[mine] if mine < len(parts) else local.narrow(dim, 0, 0)
    return local


def _checked(local: torch.Tensor, full: torch.Tensor, like: DTensor) -> torch.Tensor:
    expected = held(like).shape
    if local.shape != expected:
        raise ValueError(
            f"cutting {tuple(full.shape)} as {like.placements} over {like.device_mesh} gives {tuple(local.shape)}, "
            f"but this rank holds {tuple(expected)}"
        )
    return local.clone(memory_format=torch.contiguous_format)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's local tensor of ``tensor``, detached and sharing memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def around(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns ``local`` as a DTensor with the layout of ``like``."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def put(value: torch.Tensor, target: nn.Parameter) -> nn.Parameter:
    """Copies ``value``, this rank's part, into ``target``; replaces a ``target`` on meta by a new parameter.

    The parameter to register is returned; it carries the marks that others have set on ``target``.
    """
    if not target.is_meta:
        held(target).copy_(value)
        return target
    if isinstance(target, DTensor):
        value = around(value, target)
    new = nn.Parameter(value.detach(), requires_grad=target.requires_grad)
    vars(new).update(vars(target))
    return new


def _order(like: DTensor) -> list[int]:
    """Returns the mesh dimensions in sharding order.

    A data-parallel engine shards what tensor parallelism left of a dimension; DTensor marks such a placement as
    strided ("of the parts that a dimension further right made"), so it cuts after the plain ones.
    """
    for placement in like.placements:
        if placement.is_partial():
            raise ValueError(f"a parameter cannot be a partial sum: placements {like.placements}")
    return sorted(range(len(like.placements)), key=lambda d: hasattr(like.placements[d], "split_factor"))
