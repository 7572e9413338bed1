"""The state of shared parameters: whole ones out of the parts of a tensor group, for state dicts and in files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from smddp.modelparallel.checkpointing.optimizer_state import MASTERS
from smddp.modelparallel.tensor.split import Split, split_of

# In a part of a state: how each of its tensors is split, by name or number.
SPLITS = "_smp_splits"


def encode(splits: dict[Any, Split]) -> dict[str, Any]:
    """Return the entry of a partial state that records its splits; empty without any."""
    if not splits:
        return {}
    return {SPLITS: {key: (s.size, s.rank, s.dim, s.stored, s.whole) for key, s in splits.items()}}


def by_name(module: torch.nn.Module) -> dict[str, Split]:
    """Return the split of each split parameter of a module, by name."""
    found = ((name, split_of(q)) for name, q in module.named_parameters(remove_duplicate=False))
    return {name: split for name, split in found if split is not None}


def of_optimizer(packed: dict[str, Any], splits: dict[int, Split]) -> dict[str, Any]:
    """This stage's state of an optimizer, with whole shared tensors on the CPU. Collective over the tensor group.

    Raises NotImplementedError for a state of another shape than its parameter's.
    """
    return _changed(packed, splits, lambda split, part: split.gathered(part).cpu())


def joined_optimizers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the optimizer states that the ranks of a tensor group have saved, in order of rank."""
    first = {key: value for key, value in parts[0].items() if key != SPLITS}
    splits = {number: Split(*about) for number, about in parts[0].get(SPLITS, {}).items()}
    if not splits:
        return first
    places = iter(_tensors(first, splits))
    others = [list(_tensors(part, splits)) for part in parts]
    index = {id(tensor): number for number, tensor in enumerate(places)}
    return _changed(first, splits, lambda split, part: split.joined([other[index[id(part)]] for other in others]))


def joined_models(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of a module's state that the ranks of a tensor group have saved, in order of rank."""
    found = {key: value for key, value in parts[0].items() if key != SPLITS}
    for name, about in parts[0].get(SPLITS, {}).items():
        found[name] = Split(*about).joined([part[name] for part in parts])
    return found


def fits(part: dict[str, Any], size: int) -> bool:
    """Return True if the saved tensors are unsplit or split over ``size`` ranks."""
    return all(about[0] == size for about in part.get(SPLITS, {}).values())


def check_place(part: dict[str, Any], rank: int, size: int, name: str) -> None:
    """Raise ValueError if ``part`` belongs to another rank of a tensor group, or to a group of another size."""
    for other_size, other_rank, *_ in part.get(SPLITS, {}).values():
        if (other_rank, other_size) != (rank, size):
            raise ValueError(
                f"this part of {name} was saved by rank {other_rank} of {other_size} in its tensor group, and this is "
                f"rank {rank} of {size}; resume_from_checkpoint() finds what a rank needs"
            )


def _changed(packed: dict[str, Any], splits: dict[int, Split], change: Any) -> dict[str, Any]:
    def whole(number: int, value: Any, name: str) -> Any:
        split = splits.get(number)
        if split is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if tuple(value.shape) != split.part:
            raise NotImplementedError(
                f"the optimizer's {name!r} of a parameter that a tensor group shares has shape {tuple(value.shape)} "
                f"and not the parameter's {split.part}, so the whole of it is not known: save with partial=True"
            )
        return change(split, value)

    found = dict(packed)
    found["state"] = {
        number: {name: whole(number, value, name) for name, value in values.items()}
        for number, values in packed["state"].items()
    }
    if MASTERS in packed:
        found[MASTERS] = {number: whole(number, value, MASTERS) for number, value in packed[MASTERS].items()}
    found.pop(SPLITS, None)
    return found


def _tensors(packed: dict[str, Any], splits: dict[int, Split]) -> Iterable[torch.Tensor]:
    for number, values in packed["state"].items():
        yield from (x for x in values.values() if number in splits and isinstance(x, torch.Tensor) and x.dim())
    yield from (x for number, x in packed.get(MASTERS, {}).items() if number in splits)
