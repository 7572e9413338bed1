"""`smddp.ErrorFeedback`: DDP's gradients in a format, where what is rounded away is added to the next step's."""

# DDP compares a hook's annotations with the types themselves, so they are not left as text here.

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from smddp import formats
from smddp.torch.error_feedback.bucket import Bucket, OnItsWay
from smddp.torch.error_feedback.internode import crossing

# Elements for each rank that are worth a format.
_LARGE = 1 << 20


class ErrorFeedback:
    """What a rank owes to the gradients of a model under DDP: the state of `error_feedback_hook`.

    model: what DistributedDataParallel made, or the module in it. process_group: DDP's; None: that of what DDP made,
    else the default group. No rank is asked.

    Raises TypeError for what is no module or no group, ValueError for another group than DDP's, where there is no
    default group, and for settings with which the hook would send more than DDP does without it: a format for
    all_reduce, but none for reduce_scatter or all_gather.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"ErrorFeedback takes a module, not {type(model).__name__}")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group is a group of torch.distributed, not {type(process_group).__name__}")
        module: Any = model
        if isinstance(model, DistributedDataParallel):
            own = cast(dist.ProcessGroup, model.process_group)
            if process_group not in (None, own):
                raise ValueError("process_group is not the one that this model's DDP has")
            module, process_group = model.module, own
        self.process_group = process_group
        _check(process_group)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._buckets: dict[int, Bucket] = {}
        # Of no bucket, by parameter: what was loaded, or owed by buckets that are not any more.
        self._arrears: dict[str, Tensor] = {}
        self._summed: OnItsWay | None = None
        self._gathered: list[OnItsWay] = []

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank owes, by parameter and in its shape: {"rank0/layer.weight": ...}. Between two steps; copies.

        Each rank has its own to save and to load. Keys differ between ranks, so that a distributed checkpoint keeps
        all. Empty before the first step, and where nothing is rounded.
        """
        owed = dict(self._arrears)
        for bucket in self._buckets.values():
            owed = _sum(owed, bucket.owed())
        return {self._prefix() + name: tensor.clone() for name, tensor in owed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Has this rank owe what it owed when `state_dict` gave this, and nothing else. DDP's buckets may differ.

        With another number of ranks leave it out: a step's rounding is lost.

        Raises TypeError for what is no mapping of float32 tensors, ValueError for another rank's or another model's;
        then nothing has changed.
        """
        prefix = self._prefix()
        shapes = {prefix + name: parameter.shape for parameter, name in self._names.items()}
        loaded = checked(state, shapes)
        self._buckets.clear()
        self._arrears = {key.removeprefix(prefix): tensor for key, tensor in loaded.items()}

    def _prefix(self) -> str:
        return f"rank{dist.get_rank(self.process_group)}/"

    def _bucket(self, bucket: dist.GradBucket) -> Bucket | None:
        """What is kept for DDP's bucket; None where its all_reduce would be exact."""
        try:
            names = [self._names[parameter] for parameter in bucket.parameters()]
        except KeyError:
            raise ValueError("DDP has parameters that the model given to ErrorFeedback has not") from None
        buffer = bucket.buffer()
        served = buffer.is_cpu and buffer.dtype == torch.float32
        across = crossing(self.process_group) if served else None
        known = self._buckets.get(bucket.index())
        if known is not None and not known.is_of(bucket, names, across):
            # DDP makes buckets anew, after the first step for one. Those before this one are as they were.
            for index in [index for index in self._buckets if index >= bucket.index()]:
                self._arrears = _sum(self._arrears, self._buckets.pop(index).owed())
            known = None
        if across is None or formats.is_exact() or across.format("all_reduce", buffer.numel()) is None:
            return None
        if known is None:
            known = self._buckets[bucket.index()] = Bucket(bucket, names, across)
        return known

    def _send(self, bucket: dist.GradBucket) -> "Future[Tensor]":
        """Starts a bucket, then brings the one before it on its second way: in an order that all ranks have."""
        if bucket.index() == 0:
            # What a backward left behind that did not come to its end.
            self._summed = None
            self._gathered.clear()
        kept, buffer = self._bucket(bucket), bucket.buffer()
        if kept is None:
            future = _averaged(buffer, self.process_group)
        else:
            arrears = {name: self._arrears.pop(name) for name in kept.names if name in self._arrears}
            begun = OnItsWay(kept, buffer, arrears, self.process_group)
            self._go_on()
            self._summed, future = begun, begun.future
        if bucket.is_last():
            self._go_on()
            while self._gathered:
                self._gathered.pop(0).end()
        return future

    def _go_on(self) -> None:
        if self._summed is not None:
            self._summed.gather()
            self._gathered.append(self._summed)
            self._summed = None


def error_feedback_hook(state: ErrorFeedback, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's communication hook: what SMDDP_WIRE_FORMAT rounds away of this step's gradients is added to the next one's.

        model = DistributedDataParallel(model)
        state = smddp.ErrorFeedback(model)
        model.register_comm_hook(state, smddp.error_feedback_hook)

    Over N steps the sum of averaged gradients is that of exact ones but for one step's rounding; without, roundings
    add up. A bucket moves as a reduce_scatter and an all_gather, in the formats of those, with as many bytes as
    all_reduce. Two roundings are remembered: of what the ranks of a node contribute to other nodes' blocks, by those
    ranks, and of each block's sum, by the rank that has it. Not remembered are those of sums that a ring of more than
    two nodes takes past a node (with SMDDP_ALGO=hier there are none), what is not finite, and what is owed to a
    parameter when a step leaves it unused on all ranks. Where DDP's all_reduce is in no format (one node, buckets below
    64 KiB, other types, devices, `smddp.exact`), it is made as without the hook. A rank holds about a float for each
    parameter, divided by the ranks of its node.

    state: of this model; bucket: DDP's. Raises TypeError for another state, ValueError for another model's, and what
    the collectives raise.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
    DNNs", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019; of the
    sum, too: Tang et al., "DoubleSqueeze", 2019.
    """
    if not isinstance(state, ErrorFeedback):
        raise TypeError(f"error_feedback_hook's state is a smddp.ErrorFeedback, not {type(state).__name__}")
    return state._send(bucket)


def checked(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Copies of what `load_state_dict` was given. Raises as it."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes what state_dict gave, not {type(state).__name__}")
    for key, tensor in state.items():
        if key not in shapes:
            raise ValueError(f"nothing is owed by the name of {key!r} on this rank, but by {', '.join(shapes)}")
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            raise TypeError(f"{key!r} is a tensor of float32, not {getattr(tensor, 'dtype', type(tensor).__name__)}")
        if tensor.shape != shapes[key]:
            raise ValueError(f"{key!r} has the shape {tuple(tensor.shape)}, and what is owed {tuple(shapes[key])}")
    return {key: tensor.detach().clone() for key, tensor in state.items()}


def _check(group: dist.ProcessGroup | None) -> None:
    """Raises ValueError as `ErrorFeedback`."""
    across = crossing(group)
    if across is None or across.format("all_reduce", _LARGE * across.size) is None:
        return
    lacking = [name for name in ("reduce_scatter", "all_gather") if across.format(name, _LARGE * across.size) is None]
    if lacking:
        raise ValueError(
            f"SMDDP_WIRE_FORMAT has no format for {' and '.join(lacking)}, by which error feedback moves gradients in "
            "place of all_reduce: name one for each"
        )


def _averaged(buffer: Tensor, group: dist.ProcessGroup | None) -> "Future[Tensor]":
    """As DDP does it without a hook, which multiplies, so that the bits are the same."""
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _sum(some: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**some, **{name: some[name] + tensor if name in some else tensor for name, tensor in more.items()}}
