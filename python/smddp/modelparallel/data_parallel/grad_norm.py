"""Norm of the whole model's gradients, which are distributed over the stages.

`init` replaces the code of torch's `get_total_norm`, which `clip_grad_norm_` calls, so imported names work too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel import sharded_gradients
from smddp.modelparallel.state import state
from smddp.modelparallel.tensor.split import counts_here
from smddp.sagemaker import in_place

Norm = Callable[..., torch.Tensor]


def _own(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _of_the_model(gradients: list[torch.Tensor]) -> bool:
    """Return True for a norm of the model's gradients, which all ranks of this copy of the model compute.

    All stages run one program, so an empty list means that other stages hold the gradients.
    """
    model = state.model
    if model is None or state.ranks is None or state.ranks.mp_size == 1 or not model.partitioned:
        return False
    own = _own_gradients()
    return not gradients or any(id(gradient) in own for gradient in gradients)


def _own_gradients() -> dict[int, Any]:
    """Return the parameters and masters of this rank, by the id of their gradient."""
    found = {id(q.grad): q for q in state.model.local_parameters() if q.grad is not None}
    if state.optimizer is not None and state.optimizer.masters is not None:
        found |= {id(master.grad): q for q, master in state.optimizer.masters.pairs if master.grad is not None}
    return found


def _counted(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that this rank adds to a sum over its copy of the model; replicated ones count once."""
    if state.ranks is None or state.ranks.tp_size == 1:
        return gradients
    own = _own_gradients()
    return [gradient for gradient in gradients if counts_here(own.get(id(gradient)))]


def device(gradients: list[torch.Tensor]) -> torch.device:
    """Return the device of ``gradients`` or, without any, of this stage's parameters."""
    for tensor in (*gradients, *state.model.local_parameters()):
        return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def over_stages(
    own: torch.Tensor, gradients: list[torch.Tensor], norm_type: float, spread: bool = False
) -> torch.Tensor:
    """Return the norm over all stages; ``own`` is this rank's part. Collective over the copy of the model.

    ``spread``: the replicas hold shards of the stage's gradients, so the call is collective over them, too.
    """
    ranks = state.ranks
    assert ranks is not None  # checked by `_of_the_model`
    groups = [ranks.mp_group] * (ranks.mp_size > 1) + [ranks.rdp_group] * spread
    total = own.to(device(gradients), torch.float64)
    largest = math.isinf(norm_type)
    total = total if largest else total**norm_type
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    total = total if largest else total ** (1.0 / norm_type)
    # A stage without gradients has no dtype; single precision is sufficient for scaling.
    return total.to(torch.float32)


def _total(before: Norm, spread: bool = False) -> Norm:
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm_type = float(norm_type)
        if sharded_gradients.sharded(gradients) and state.ranks is not None:
            total = sharded_gradients.norm(gradients, norm_type, _counted(gradients), state.ranks.tp_group)
        elif spread or _of_the_model(gradients):
            own = before(_counted(gradients), norm_type, False, foreach)
            total = over_stages(own, gradients, norm_type, spread)
        else:
            return before(gradients, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the model's gradients is non-finite on all stages: {total}"
            )
        return total

    return total_norm


def norm(
    gradients: list[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False, spread: bool = False
) -> torch.Tensor:
    """Return the norm of ``gradients``; for the model's gradients over all stages, collective over its copy.

    ``spread``: each replica holds a shard of them; see `over_stages`.
    """
    return _total(lambda found, kind, *_: _own(found, kind), spread)(gradients, norm_type, error_if_nonfinite)


def in_step(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of an optimizer's gradients during its step; ``shard_optimizer_state`` limits them to a shard."""
    return norm(gradients, spread=state.optimizer is not None and state.optimizer.shares is not None)


@torch.no_grad()
def clip(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    spread: bool = False,
) -> torch.Tensor:
    """Implements `clip_grad_norm_` with the whole model's norm."""
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    total = norm(gradients, norm_type, error_if_nonfinite, spread)
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for gradient in sharded_gradients.pieces(gradients):
        gradient.mul_(factor.to(gradient.device))
    return total


def install() -> Callable[[], None]:
    """Makes torch's `get_total_norm` and `clip_grad_norm_` use the whole model's norm; returns an undo function."""
    return in_place.wrap(torch.nn.utils.get_total_norm, _total)
