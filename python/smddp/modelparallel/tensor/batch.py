"""The batch of a step under tensor parallelism: every rank of a tensor group computes with the batches of all.

If the ranks read different batches (`prescaled_batch` False), the arguments are joined per microbatch before the
computation, and each rank receives the results of its samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.private_names import pytree
from smddp.modelparallel.ranks import Ranks


@dataclass
class Share:
    """This rank's samples among those of its tensor group, by how many there are in a microbatch of all: (first,
    number). Empty where all read the same."""

    of: dict[int, tuple[int, int]] = field(default_factory=dict)

    def mine(self, results: list[Any]) -> list[Any]:
        """Select this rank's samples from result tensors of microbatches that have the samples of all ranks."""
        return [pytree.tree_map(self._mine, result) for result in results] if self.of else results

    def _mine(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] in self.of:
            return leaf.narrow(0, *self.of[leaf.shape[0]])
        return leaf


def axes(value: Any, axis: Any, name: str) -> dict[str, int]:
    """Return the axis along which `microbatching.split` splits each leaf of an argument, by the leaf's name."""
    if isinstance(value, Mapping):
        of = axis if isinstance(axis, Mapping) else dict.fromkeys(value, axis)
        parts = [axes(value[key], of.get(key, 0), f"{name}[{key!r}]") for key in value]
    elif isinstance(value, (list, tuple)):
        each = axis if isinstance(axis, (list, tuple)) else [axis] * len(value)
        parts = [axes(leaf, at, f"{name}[{index}]") for index, (leaf, at) in enumerate(zip(value, each))]
    else:
        if hasattr(value, "smp_slice"):
            name = plain(name)
            raise ValueError(
                f"step: {name} defines its own split (smp_slice), so the batches of a tensor group's ranks "
                "cannot be put together: set 'prescaled_batch': True and let them read the same"
            )
        return {name: axis}
    return {key: at for part in parts for key, at in part.items()}


def united(
    given: dict[str, torch.Tensor], seed: int, of: dict[str, int], microbatches: int, prescaled: bool, ranks: Ranks
) -> tuple[dict[str, torch.Tensor], int, dict[int, list[int]]]:
    """Return the tensors and the seed common to the tensor group. Collective over the group.

    Args:
        given: this rank's tensors by name.
        of: the split axis of each split tensor.

    Returns also, for `share`, the samples that each rank has in a microbatch, by their sum.
    """
    group, size = ranks.tp_group, ranks.tp_size
    if prescaled:
        about = {name: (tuple(x.shape), zlib.crc32(_bytes(x))) for name, x in given.items()}
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (about, seed), group=group)
        first = gathered[0][0]
        for other, (theirs, _) in enumerate(gathered):
            odd = sorted(name for name in theirs.keys() | first.keys() if theirs.get(name) != first.get(name))
            if odd:
                raise ValueError(
                    f"step: {plain(odd[0])} differs between the ranks 0 and {other} of a tensor group. With "
                    "'prescaled_batch': True they read the same batch, that of smp.rdp_rank() among smp.rdp_size()"
                )
        return given, gathered[0][1], {}
    found: list[Any] = [None] * size
    dist.all_gather_object(found, ({name: x.cpu() for name, x in given.items()}, seed), group=group)
    batches = [tensors for tensors, _ in found]
    counts: dict[int, list[int]] = {}
    for name, x in list(given.items()):
        if any(name not in other for other in batches):
            raise ValueError(f"step: not every rank of the tensor group gives a tensor as {plain(name)}")
        if name not in of or not x.dim():
            given[name] = batches[0][name].to(x.device)
            continue
        given[name], parts = _along(plain(name), [other[name] for other in batches], of[name], microbatches)
        given[name] = given[name].to(x.device)
        counts.setdefault(sum(parts), parts)
    return given, found[0][1], counts


def _along(name: str, parts: list[torch.Tensor], axis: Any, microbatches: int) -> tuple[torch.Tensor, list[int]]:
    """Join the tensors of all ranks such that each microbatch has a part of each."""
    shapes = [tuple(part.shape) for part in parts]
    if not isinstance(axis, int) or not -parts[0].dim() <= axis < parts[0].dim():
        raise ValueError(f"step: {name} of shape {shapes[0]} has no axis {axis!r} to split along")
    rest = {(len(shape), *(n for at, n in enumerate(shape) if at != axis % len(shape))) for shape in shapes}
    if len(rest) > 1:
        raise ValueError(
            f"step: {name} has the shapes {', '.join(map(str, shapes))} on the ranks of a tensor group, which compute "
            "with all of them together: pad to one length, or set 'prescaled_batch': True and let them read the same"
        )
    for shape in shapes:
        if shape[axis] % microbatches:
            raise ValueError(
                f"step: {name} has {shape[axis]} elements along axis {axis}, which {microbatches} microbatches do not "
                "divide: change the batch or 'microbatches', or name the argument in non_split_inputs"
            )
    pieces = [part.chunk(microbatches, axis) for part in parts]
    together = [each[number] for number in range(microbatches) for each in pieces]
    return torch.cat(together, axis), [shape[axis] // microbatches for shape in shapes]


def share(counts: dict[int, list[int]], rank: int) -> Share:
    """Return the samples of the ``rank``-th rank of the group."""
    return Share({total: (sum(parts[:rank]), parts[rank]) for total, parts in counts.items()})


def plain(name: str) -> str:
    """Return a leaf's name for error messages: the argument's name, without brackets."""
    return name[1:-1].replace("'", "") if name.startswith("[") and name.count("[") == 1 else name


def _bytes(x: torch.Tensor) -> bytes:
    return (
        x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() and x.dim() else repr(x).encode()
    )
