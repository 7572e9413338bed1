"""Equality check of a tensor group's inputs during the first forward passes.

Outside regions all ranks of a group compute the same values. Different samples or random numbers there would train
wrongly without an error. So the check compares sums over the inputs of regions: at the first region before the first
reduction, at all other regions at the end of the pass. Each comparison costs one small all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.sagemaker.names import plain_name
from smddp.sagemaker.tensor_parallel.regions import SharedInput, TensorGroup

# Module attribute of all modules that `transform` has processed.
_KNOWN = "_tp_known"
# Number of compared entries per pass, which gives the all-gather one size on all ranks.
_MOST = 256
# Wrappers of torch and transformers that only forward to the wrapped module or hold parameter copies.
_TRANSPARENT = (
    "FullyShardedDataParallel",
    "ActivationWrapper",
    "OptimizedModule",
    "DataParallel",
)


class Agreement(SharedInput):
    """Compares the region inputs of one model, in ``passes`` training and ``passes`` evaluation forward passes."""

    def __init__(self, tp: TensorGroup, passes: int) -> None:
        self._tp = tp
        self._left = {True: passes, False: passes}
        self._sums: list[torch.Tensor] | None = None
        self._places: list[str] = []
        self._wrappers_checked = False

    def attach(self, model: nn.Module) -> None:
        """Check forward passes of ``model``, which must be complete."""
        mark_checked(model)
        self._tp.shared_input = self
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def check_equal(self, tensor: torch.Tensor, where: str) -> None:
        """Check that ``tensor``, which enters a region, is equal on all ranks.

        Raises RuntimeError on every rank of the group if the first tensor of a pass differs.
        """
        if torch.compiler.is_compiling() or self._sums is None or tensor.is_meta:
            return  # compiled code is not checked
        self._sums.append(_sums(tensor))
        self._places.append(where)
        if len(self._sums) == 1:
            shape = torch.tensor([tensor.dim(), *tensor.shape[:4], *[0] * (4 - tensor.dim())], dtype=torch.float64)
            self._compare([torch.cat([self._sums[0].cpu(), shape])])

    def _begin(self, model: nn.Module, *_: Any) -> None:
        if not self._wrappers_checked:
            self._wrappers_checked = True
            refuse_wrapped(model)
        self._sums = None
        if self._left[model.training] > 0 and not torch.compiler.is_compiling():
            self._left[model.training] -= 1
            self._sums, self._places = [], []

    def _end(self, *_: Any) -> None:
        sums, self._sums = self._sums, None
        if sums:
            empty = torch.zeros_like(sums[0])
            self._compare([*sums[:_MOST], *[empty] * (_MOST - len(sums))])

    def _compare(self, rows: list[torch.Tensor]) -> None:
        """Raise if any of ``rows``, (sum, rounding tolerance, values that must be equal), differs between ranks."""
        mine = torch.stack(rows).to(self._tp.mesh.device_type)
        of_all = mine.new_empty((self._tp.size, *mine.shape))
        dist.all_gather_into_tensor(of_all.view(-1), mine.view(-1), group=self._tp.group)
        apart = (of_all - of_all[0]).abs()
        # Accept sums that are NaN on all ranks: such values come from the training itself.
        differs = (apart[..., 0] > of_all[0, :, 1]) | (apart[..., 2:] > 0).any(-1)
        differs |= of_all[..., 0].isfinite() != of_all[0, :, 0].isfinite()
        if bool(differs.any()):
            first = int(differs.any(0).nonzero()[0])
            raise RuntimeError(self._text(self._places[first] if first < len(self._places) else self._places[-1]))

    def _text(self, where: str) -> str:
        size = self._tp.size
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self._tp.group)))
        return (
            f"ranks {ranks} share each layer (tensor_parallel_degree={size}), but entered {where} with different "
            "inputs: outside of shared layers they must see the same samples and draw the same random numbers. Split "
            "the data by tsm.state.dp_rank of tsm.state.dp_size, not by the ranks of the world, and seed by "
            "tsm.state.dp_rank. Accelerate and Trainer do so where they are made after tsm.init(). "
            "tensor_parallel_checks=0 in the configuration turns this check off"
        )


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a weighted sum of all elements, to distinguish tensors, and its maximum rounding error."""
    with torch.no_grad():
        floating = tensor.is_floating_point()
        rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        # Separate weights of rows and columns avoid an allocation of the tensor's size.
        columns = rows.double() if not floating else rows
        sums = (columns @ _weights(columns.shape[1], columns)).double()
        total = sums @ _weights(len(sums), sums)
        if not floating:
            return torch.stack([total, torch.zeros_like(total)])
        rounding = 8 * torch.finfo(tensor.dtype).eps * torch.linalg.vector_norm(sums)
        return torch.stack([total, rounding])


def _weights(length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, length + 1, dtype=torch.float64, device=like.device).sqrt().cos().add_(1.5).to(like.dtype)


def mark_checked(module: nn.Module) -> None:
    """Mark ``module`` and its submodules as correctly sharded or replicated."""
    for inside in module.modules():
        inside.__dict__[_KNOWN] = True


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if unsupported modules wrap sharded layers."""
    for name, module in model.named_modules():
        if _KNOWN in module.__dict__ or _hands_on(module):
            continue
        inside = [child for child in module.modules() if hasattr(child, "_tp_block") or hasattr(child, "_tp_group")]
        if inside:
            raise ValueError(
                f"{plain_name(name)} has become a {type(module).__module__}.{type(module).__name__} around a layer "
                "that transform() had shared among the ranks of a tensor group. Its own parameters are not sharded "
                "and diverge between ranks. PEFT's LoRA is supported before and after transform(); add other adapters "
                "before transform(), with a plan that names their parts"
            )


def _hands_on(module: nn.Module) -> bool:
    names = {base.__name__ for base in type(module).__mro__}
    return any(name in names or f"Distributed{name}" in names for name in _TRANSPARENT)
