"""`smddp.experimental.error_feedback_fsdp`: compressed FSDP2 gradients with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smddp import formats
from smddp.experimental.fsdp_overlap import fsdp_groups, fsdp_units
from smddp.observability import log
from smddp.torch.error_feedback.ddp import checked
from smddp.torch.error_feedback.internode import internode_reduce
from smddp.torch.error_feedback.rounding import GROUP


class FsdpErrorFeedback:
    """The residuals of an FSDP2 model's gradients on this rank, returned by `error_feedback_fsdp`."""

    def __init__(self, comms: dict[str, _ReduceScatter]) -> None:
        self._comms = comms

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of this rank's residuals by unit: {"rank0/layers.1": (rows, 256), ...}. Call between steps.

        Each rank saves and loads its own. Keys differ between ranks, so a distributed checkpoint keeps all. Empty
        before the first step and without rounding.
        """
        comms = self._comms.items()
        return {comm.prefix + name: comm.residual.clone() for name, comm in comms if comm.residual is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces this rank's residuals by those of `state_dict`.

        Do not load after a change of ranks, nodes or format; the rounding error of one step is then lost.

        Args:
            state: Result of `state_dict` on this rank.

        Raises:
            TypeError: `state` does not map to float32 tensors. The residuals are unchanged.
            ValueError: The state belongs to another rank, model or split. The residuals are unchanged.
        """
        shapes = {
            comm.prefix + name: shape for name, comm in self._comms.items() if (shape := comm.shape()) is not None
        }
        loaded = checked(state, shapes)
        for name, comm in self._comms.items():
            comm.residual = loaded.get(comm.prefix + name)


def error_feedback_fsdp(model: nn.Module) -> FsdpErrorFeedback:
    """Adds the rounding error of SMDDP_WIRE_FORMAT to the next step's FSDP2 gradients.

    Over N steps the sum of a shard's gradients differs from the exact sum by the rounding error of one step; without
    this, errors accumulate. Fed back are errors of a node's contributions to remote shards. Lost are errors of partial
    sums in a ring of more than two nodes (none with SMDDP_ALGO=hier), and values that are not finite. Without a format
    (one node, buffers below 64 KiB, other types, devices, `smddp.exact`) a unit's reduce_scatter is unchanged, as in a
    step in which one of its parameters has no gradient. A rank stores one float per parameter of the whole model,
    divided by the ranks of its node. It does not communicate. Sources: see `smddp.error_feedback_hook`.

    Args:
        model: Module for which `fully_shard` was called, after it was called for all its parts and after
            `set_allocate_memory_from_process_group_for_comm`, if that is wanted; before or after `overlap_fsdp`.

    Returns:
        The residuals.

    Raises:
        TypeError: The model is without FSDP2.
        RuntimeError: torch is older than 2.9.
        ValueError: It is a second call, or a second mesh dimension reduces the gradients in a format: that rounding
            error cannot be fed back.

    Example:
        >>> fully_shard(model)
        >>> feedback = smddp.experimental.error_feedback_fsdp(model)
        >>> torch.save({"feedback": feedback.state_dict()}, f"rank{dist.get_rank()}.pt")
    """
    units = fsdp_units(model, "error_feedback_fsdp")
    comms: dict[str, _ReduceScatter] = {}
    places: list[tuple[Any, _ReduceScatter]] = []
    for fqn, unit in units.items():
        for number, group in enumerate(fsdp_groups(unit)):
            _check(fqn, group)
            comm = _ReduceScatter(group, group._reduce_scatter_comm)
            comms[f"{fqn}#{number}" if number else fqn] = comm
            places.append((group, comm))
    for group, comm in places:
        group._reduce_scatter_comm = comm
    if any(group.device.type != "cpu" for group, _ in places):
        log.info("error_feedback_fsdp: no effect on tensors of devices, which are sent without a format")
    return FsdpErrorFeedback(comms)


def _check(fqn: str, group: Any) -> None:
    """Raises ValueError as `error_feedback_fsdp`."""
    comm = group._reduce_scatter_comm
    while comm is not None:
        if isinstance(comm, _ReduceScatter):
            raise ValueError(f"error_feedback_fsdp was already called for {fqn or 'this model'}")
        comm = getattr(comm, "inner", None)
    over = getattr(group.mesh_info, "replicate_process_group", None)
    internode = internode_reduce(over) if over is not None else None
    if internode is not None and internode.format("all_reduce", _elements(group)) is not None:
        raise ValueError(
            f"the gradients of {fqn or 'this model'} are reduced over a second mesh dimension by an all_reduce in a "
            "format, whose rounding error cannot be fed back; shard over all ranks, or name formats without all_reduce"
        )


def _elements(group: Any) -> int:
    """Returns the elements of this rank's gradient shard if all trainable parameters have a gradient."""
    trainable = (parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad)
    return sum(parameter.padded_sharded_param_size.numel() for parameter in trainable)


class _ReduceScatter:
    """Replacement for FSDP2's reduce_scatter `inner` of one parameter group; rounds, then calls `inner`."""

    def __init__(self, group: Any, inner: Any) -> None:
        self.inner = inner
        self.residual: Tensor | None = None
        self._group = group

    @property
    def prefix(self) -> str:
        return f"rank{dist.get_rank()}/"

    def shape(self) -> torch.Size | None:
        """Returns the shape of the residual; None without rounding."""
        over = getattr(self._group.mesh_info, "shard_process_group", None)
        internode = internode_reduce(over) if over is not None else None
        share = internode.share(_elements(self._group)) if internode is not None else None
        return None if share is None else torch.Size((share, GROUP))

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        # With fewer elements the parameters they belong to are unknown.
        whole = output_tensor.numel() == _elements(self._group)
        served = input_tensor.is_cpu and input_tensor.dtype == torch.float32
        internode = internode_reduce(group) if whole and served and not formats.is_exact() else None
        if internode is not None:
            self.residual = internode.round(input_tensor.view(internode.size, -1), self.residual)
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
