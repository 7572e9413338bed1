"""`smddp.ErrorFeedback`: compressed DDP gradients whose rounding error is added to the next step's gradients."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from smddp import formats
from smddp.torch.error_feedback.bucket import Bucket, PendingBucket
from smddp.torch.error_feedback.internode import internode_reduce

# Elements for each rank that are sent in a format.
_LARGE = 1 << 20


class ErrorFeedback:
    """The state of `error_feedback_hook`: the residuals of a model's gradients under DDP on this rank.

    model: a DistributedDataParallel, or the module in it. process_group: DDP's; None: that of the
    DistributedDataParallel, else the default group. Does not communicate.

    Raises TypeError for another type of model or group, ValueError for another group than DDP's, without a default
    group, and for a format for all_reduce without one for reduce_scatter and all_gather: the hook would then send more
    bytes than DDP without it.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"ErrorFeedback: expected a module, got {type(model).__name__}")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a torch.distributed group, got {type(process_group).__name__}")
        module: Any = model
        if isinstance(model, DistributedDataParallel):
            own = model.process_group
            if process_group not in (None, own):
                raise ValueError("process_group differs from the model's DDP group; pass that group or None")
            module, process_group = model.module, own
        self.process_group = process_group
        _check(process_group)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._buckets: dict[int, Bucket] = {}
        # Residuals by parameter that belong to no bucket: loaded ones, and those of dropped buckets.
        self._residual: dict[str, Tensor] = {}
        self._summed: PendingBucket | None = None
        self._gathered: list[PendingBucket] = []

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of this rank's residuals by parameter: {"rank0/layer.weight": ...}. Call between two steps.

        Each rank saves and loads its own. Keys differ between ranks, so a distributed checkpoint keeps all. Empty
        before the first step and without rounding.
        """
        residual = dict(self._residual)
        for bucket in self._buckets.values():
            residual = _sum(residual, bucket.residual())
        return {self._prefix() + name: tensor.clone() for name, tensor in residual.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces this rank's residuals by those of `state_dict`. DDP's buckets may differ.

        Do not load after a change of the number of ranks; the rounding error of one step is then lost.

        Args:
            state: Result of `state_dict` on this rank.

        Raises:
            TypeError: `state` does not map to float32 tensors. The residuals are unchanged.
            ValueError: The state belongs to another rank or model. The residuals are unchanged.
        """
        prefix = self._prefix()
        shapes = {prefix + name: parameter.shape for parameter, name in self._names.items()}
        loaded = checked(state, shapes)
        self._buckets.clear()
        self._residual = {key.removeprefix(prefix): tensor for key, tensor in loaded.items()}

    def _prefix(self) -> str:
        return f"rank{dist.get_rank(self.process_group)}/"

    def _bucket(self, bucket: dist.GradBucket) -> Bucket | None:
        """Returns the state of DDP's bucket; None if its all_reduce would be exact."""
        try:
            names = [self._names[parameter] for parameter in bucket.parameters()]
        except KeyError:
            raise ValueError(
                "DDP has parameters that the model of ErrorFeedback lacks; pass the model that DDP wraps"
            ) from None
        buffer = bucket.buffer()
        served = buffer.is_cpu and buffer.dtype == torch.float32
        internode = internode_reduce(self.process_group) if served else None
        known = self._buckets.get(bucket.index())
        if known is not None and not known.is_of(bucket, names, internode):
            # DDP rebuilds buckets, for example after the first step. Earlier ones are unchanged.
            for index in [index for index in self._buckets if index >= bucket.index()]:
                self._residual = _sum(self._residual, self._buckets.pop(index).residual())
            known = None
        if internode is None or formats.is_exact() or internode.format("all_reduce", buffer.numel()) is None:
            return None
        if known is None:
            known = self._buckets[bucket.index()] = Bucket(bucket, names, internode)
        return known

    def _send(self, bucket: dist.GradBucket) -> "Future[Tensor]":
        """Starts a bucket, then the all_gather of the one before it, in the same order on all ranks."""
        if bucket.index() == 0:
            # Left over from an interrupted backward pass.
            self._summed = None
            self._gathered.clear()
        kept, buffer = self._bucket(bucket), bucket.buffer()
        if kept is None:
            future = _averaged(buffer, self.process_group)
        else:
            residual = {name: self._residual.pop(name) for name in kept.names if name in self._residual}
            started = PendingBucket(kept, buffer, residual, self.process_group)
            self._start_all_gather()
            self._summed, future = started, started.future
        if bucket.is_last():
            self._start_all_gather()
            while self._gathered:
                self._gathered.pop(0).end()
        return future

    def _start_all_gather(self) -> None:
        if self._summed is not None:
            self._summed.gather()
            self._gathered.append(self._summed)
            self._summed = None


def error_feedback_hook(state: ErrorFeedback, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook: adds the rounding error of SMDDP_WIRE_FORMAT to the next step's gradients.

    Over N steps the sum of averaged gradients differs from the exact sum by the rounding error of one step; without
    the hook, errors accumulate. A bucket is sent by a reduce_scatter and an all_gather in their formats, with as many
    bytes as an all_reduce. Two errors are fed back: of a node's contributions to remote blocks, and of each block's
    sum. Lost are errors of partial sums in a ring of more than two nodes (none with SMDDP_ALGO=hier), values that are
    not finite, and the residual of a parameter that no rank uses in a step. Without a format (one node, buckets below
    64 KiB, other types, devices, `smddp.exact`) the hook calls all_reduce like DDP. A rank stores about one float per
    parameter, divided by the ranks of its node.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
    DNNs", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019; of the
    sum, too: Tang et al., "DoubleSqueeze", 2019.

    Args:
        state: Residuals of this model.
        bucket: Gradients that DDP passes.

    Raises:
        TypeError: `state` has another type.
        ValueError: `state` belongs to another model.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> state = smddp.ErrorFeedback(model)
        >>> model.register_comm_hook(state, smddp.error_feedback_hook)
    """
    if not isinstance(state, ErrorFeedback):
        raise TypeError(f"error_feedback_hook: expected a smddp.ErrorFeedback as state, got {type(state).__name__}")
    return state._send(bucket)


def checked(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns copies of the tensors for `load_state_dict`. Raises TypeError or ValueError as it does."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: expected the mapping of state_dict, got {type(state).__name__}")
    for key, tensor in state.items():
        if key not in shapes:
            raise ValueError(f"unknown key {key!r} on this rank: expected {', '.join(shapes)}")
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            raise TypeError(
                f"{key!r}: expected a float32 tensor, got {getattr(tensor, 'dtype', type(tensor).__name__)}"
            )
        if tensor.shape != shapes[key]:
            raise ValueError(f"{key!r}: expected shape {tuple(shapes[key])}, got {tuple(tensor.shape)}")
    return {key: tensor.detach().clone() for key, tensor in state.items()}


def _check(group: dist.ProcessGroup | None) -> None:
    """Raises ValueError as `ErrorFeedback`."""
    internode = internode_reduce(group)
    if internode is None or internode.format("all_reduce", _LARGE * internode.size) is None:
        return
    lacking = [
        name for name in ("reduce_scatter", "all_gather") if internode.format(name, _LARGE * internode.size) is None
    ]
    if lacking:
        raise ValueError(
            f"SMDDP_WIRE_FORMAT has no format for {' and '.join(lacking)}, which error feedback uses in place of "
            "all_reduce: name one for each"
        )


def _averaged(buffer: Tensor, group: dist.ProcessGroup | None) -> "Future[Tensor]":
    """Averages a buffer as DDP does without a hook: it multiplies, so the bits are equal."""
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _sum(some: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**some, **{name: some[name] + tensor if name in some else tensor for name, tensor in more.items()}}
