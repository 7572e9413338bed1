"""Views of a sharded model under the names that published scripts read: those of DeepSpeed's ZeRO.

    parameter.ds_tensor                      this rank's elements, flat; .ds_numel counts them
    parameter.ds_numel, parameter.ds_shape   of the whole parameter
    optimizer.fp16_groups                    the parameters of each group
    optimizer.fp32_partitioned_groups_flat   this rank's elements of each group
    optimizer.ds_param_shard_group           the ranks that hold a parameter together

Views show the values of the moment in which they are used. Assigning to these attributes changes nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.private_names import pytree

OF_OPTIMIZER = ("fp16_groups", "fp32_partitioned_groups_flat", "ds_param_shard_group")


class Elements:
    """This rank's elements of parameters, one after another. Functions of torch take it for a flat tensor."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    @property
    def data(self) -> torch.Tensor:
        """Current elements: a view of one parameter, a copy of several."""
        pieces = [_piece(parameter()) for parameter in self._parameters]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0)

    @property
    def ds_numel(self) -> int:
        """The number of elements."""
        return sum(_piece(parameter()).numel() for parameter in self._parameters)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Narrow as a tensor; the elements of one parameter are a view."""
        first = 0
        for reference in self._parameters:
            size = _piece(reference()).numel()
            if dim == 0 and (first, size) == (start, length):
                return Elements([reference()])
            first += size
        return self.data.narrow(dim, start, length)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.data, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x.data if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def _piece(parameter: Any) -> torch.Tensor:
    if parameter is None:
        raise RuntimeError("the parameter of this view was freed: read the views of the model that is trained now")
    return parameter.to_local().detach().reshape(-1)


def attach(module: nn.Module) -> None:
    """Give the parameters of a sharded module their views."""
    for parameter in module.parameters():
        views = {"ds_tensor": Elements([parameter]), "ds_numel": parameter.numel(), "ds_shape": parameter.shape}
        parameter.__dict__.update(views)


def of_optimizer(name: str, groups: list[dict[str, Any]], mesh: Any) -> Any:
    """Return the view ``name`` of an optimizer with these parameter groups."""
    if name == "ds_param_shard_group":
        return mesh.get_group(mesh.ndim - 1)
    parameters = [list(group["params"]) for group in groups]
    return parameters if name == "fp16_groups" else [Elements(each) for each in parameters]
