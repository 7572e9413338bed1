"""`smddp.error_feedback_fsdp`: FSDP2's gradients in a format; what is rounded away is added to the next step's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smddp import formats
from smddp.observability import log
from smddp.torch.error_feedback.ddp import checked
from smddp.torch.error_feedback.internode import crossing
from smddp.torch.error_feedback.rounding import GROUP
from smddp.torch.fsdp_overlap import fsdp_groups, fsdp_units


class FsdpErrorFeedback:
    """What a rank owes to the gradients of a model that FSDP2 shards. `error_feedback_fsdp` makes it."""

    def __init__(self, comms: dict[str, _ReduceScatter]) -> None:
        self._comms = comms

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank owes, by unit: {"rank0/layers.1": (rows, 256), ...}. Between two steps; copies.

        Each rank has its own to save and to load. Keys differ between ranks, so that a distributed checkpoint keeps
        all. Empty before the first step, and where nothing is rounded.
        """
        comms = self._comms.items()
        return {comm.prefix + name: comm.owed.clone() for name, comm in comms if comm.owed is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Has this rank owe what it owed when `state_dict` gave this, and nothing else.

        With another number of ranks, other nodes, or another format leave it out: a step's rounding is lost.

        Raises TypeError for what is no mapping of float32 tensors, ValueError for another rank's, another model's or
        another split's; then nothing has changed.
        """
        shapes = {
            comm.prefix + name: shape for name, comm in self._comms.items() if (shape := comm.shape()) is not None
        }
        loaded = checked(state, shapes)
        for name, comm in self._comms.items():
            comm.owed = loaded.get(comm.prefix + name)


def error_feedback_fsdp(model: nn.Module) -> FsdpErrorFeedback:
    """Has what SMDDP_WIRE_FORMAT rounds away of FSDP2's gradients be added to the next step's. Returns what is owed.

    model: a module for which `fully_shard` was called, after it was called for all its parts and after
    `set_allocate_memory_from_process_group_for_comm`, if that is wanted; before or after `smddp.overlap_fsdp`. Needs
    torch 2.9. No rank is asked.

        fully_shard(model)
        owed = smddp.error_feedback_fsdp(model)
        ...
        torch.save({"owed": owed.state_dict(), ...}, f"rank{dist.get_rank()}.pt")

    Over N steps the sum of a shard's gradients is that of exact ones but for one step's rounding; without, roundings
    add up. Remembered is what is rounded of what the ranks of a node contribute to other nodes' shards, by those ranks.
    Not remembered are the roundings of sums that a ring of more than two nodes takes past a node (with SMDDP_ALGO=hier
    there are none), and what is not finite. Where a unit's reduce_scatter is in no format (one node, buffers below
    64 KiB, other types, devices, `smddp.exact`), it is made as without this, and likewise in a step in which one of the
    unit's parameters has no gradient. A rank holds a float for each parameter of the whole model, divided by the ranks
    of its node.

    Raises TypeError for a model without FSDP2, RuntimeError for a torch that is too old, ValueError for a model that
    has it already, and for one whose gradients are reduced in a format over a second dimension of the mesh, too: what
    is rounded there cannot be remembered.

    Sources: as of `smddp.error_feedback_hook`.
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
        log.tell("error_feedback_fsdp: tensors of a device travel as they are, so nothing is changed there")
    return FsdpErrorFeedback(comms)


def _check(fqn: str, group: Any) -> None:
    """Raises ValueError as `error_feedback_fsdp`."""
    comm = group._reduce_scatter_comm
    while comm is not None:
        if isinstance(comm, _ReduceScatter):
            raise ValueError(f"error_feedback_fsdp was called before for {fqn or 'this model'}")
        comm = getattr(comm, "inner", None)
    over = getattr(group.mesh_info, "replicate_process_group", None)
    across = crossing(over) if over is not None else None
    if across is not None and across.format("all_reduce", _elements(group)) is not None:
        raise ValueError(
            f"the gradients of {fqn or 'this model'} are reduced over a second dimension of the mesh, by an all_reduce "
            "in a format, whose rounding cannot be remembered; shard over all ranks, or name formats without all_reduce"
        )


def _elements(group: Any) -> int:
    """Of this rank's shard of the gradients, if all parameters that learn have one."""
    learning = (parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad)
    return sum(parameter.padded_sharded_param_size.numel() for parameter in learning)


class _ReduceScatter:
    """What FSDP2 calls for a group of parameters, in place of `inner`, which does the work."""

    def __init__(self, group: Any, inner: Any) -> None:
        self.inner = inner
        self.owed: Tensor | None = None
        self._group = group

    @property
    def prefix(self) -> str:
        return f"rank{dist.get_rank()}/"

    def shape(self) -> torch.Size | None:
        """Of what may be owed; None where nothing is rounded."""
        over = getattr(self._group.mesh_info, "shard_process_group", None)
        across = crossing(over) if over is not None else None
        share = across.share(_elements(self._group)) if across is not None else None
        return None if share is None else torch.Size((share, GROUP))

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        # Of fewer elements one cannot tell whose they are.
        whole = output_tensor.numel() == _elements(self._group)
        served = input_tensor.is_cpu and input_tensor.dtype == torch.float32
        across = crossing(group) if whole and served and not formats.is_exact() else None
        if across is not None:
            self.owed = across.round(input_tensor.view(across.size, -1), self.owed)
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
