"""The names in a state dict against those in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from smddp.text import nearest

_SHOWN = 6
# What tensor parallelism splits off where key and value heads do not divide by the degree.
_SPLIT = "key_value_weight"


def check(asked: set[str], metadata: Metadata, where: str) -> None:
    """Refuses a state dict whose names are not those of the checkpoint.

    A state dict may leave out whole top-level entries ("optimizer"); of those it has, it must name each tensor.

    Raises:
        ValueError: names the checkpoint does not have, each with the nearest it has; tensors of the checkpoint that
            the state dict does not ask for.
    """
    saved = metadata.state_dict_metadata
    paths: dict[str, Any] = metadata.planner_data or {}

    def top(name: str) -> Any:
        return paths[name][0] if name in paths else name.split(".")[0]

    absent = sorted(asked - saved.keys())
    asked_tops = {top(name) for name in asked & saved.keys()} | {name.split(".")[0] for name in absent}
    extra = sorted(
        name
        for name, entry in saved.items()
        if name not in asked and isinstance(entry, TensorStorageMetadata) and top(name) in asked_tops
    )
    if not absent and not extra:
        return
    said = []
    if absent:
        said.append(f"it does not have {_list(absent, saved)}")
    if extra:
        said.append(f"the state dict does not ask for its {_list(extra, ())}")
        if any(".state." in name for name in extra):
            said.append("an optimizer that has not stepped has no state to load into: call init_optim_state first")
    if any(name.endswith(_SPLIT) for name in [*absent, *extra]):
        said.append(
            "a fused weight is stored as two at one tensor-parallel degree and as one at the other: write it with "
            "save_pretrained and read it with load_pretrained"
        )
    raise ValueError(f"the names in {where} do not match: {'; '.join(said)}")


def check_same(names: list[list[str]], ranks: list[int]) -> None:
    """Refuses state dicts that differ between ranks.

    Raises:
        ValueError: with the names that only some ranks have.
    """
    common = set(names[0]).intersection(*names[1:])
    odd = {rank: sorted(set(mine) - common)[:_SHOWN] for rank, mine in zip(ranks, names) if set(mine) - common}
    if odd:
        raise ValueError(f"the ranks ask for different entries; not on all ranks, by rank: {odd}")


def _list(names: list[str], near: Any) -> str:
    shown = []
    for name in names[:_SHOWN]:
        close = nearest(name, near)
        shown.append(f"{name} (nearest: {close})" if close else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
