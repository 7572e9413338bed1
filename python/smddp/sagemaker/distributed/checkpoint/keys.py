"""Comparison of a state dict's names with a checkpoint's names."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from smddp.text import nearest

_SHOWN = 6
# Suffix of the weight that tensor parallelism splits off if the degree does not divide the key and value heads.
_SPLIT = "key_value_weight"


def check(asked: set[str], metadata: Metadata, where: str) -> None:
    """Checks the state dict's names against the checkpoint's names.

    A state dict may omit whole top-level entries ("optimizer"), but must name each tensor of the entries it contains.

    Raises:
        ValueError: names that the checkpoint lacks, each with its nearest match; checkpoint tensors that the state
            dict omits.
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
    problems = []
    if absent:
        problems.append(f"it does not have {_list(absent, saved)}")
    if extra:
        problems.append(f"the state dict does not ask for its {_list(extra, ())}")
        if any(".state." in name for name in extra):
            problems.append("an optimizer that has not stepped has no state to load into: call init_optim_state first")
    if any(name.endswith(_SPLIT) for name in [*absent, *extra]):
        problems.append(
            "a fused weight is stored as two at one tensor-parallel degree and as one at the other: write it with "
            "save_pretrained and read it with load_pretrained"
        )
    raise ValueError(f"the names in {where} do not match: {'; '.join(problems)}")


def check_same(names: list[list[str]], ranks: list[int]) -> None:
    """Checks that all ranks' state dicts have equal names.

    Raises:
        ValueError: names that only some ranks have.
    """
    common = set(names[0]).intersection(*names[1:])
    odd = {rank: sorted(set(mine) - common)[:_SHOWN] for rank, mine in zip(ranks, names) if set(mine) - common}
    if odd:
        raise ValueError(f"the ranks ask for different entries; not on all ranks, by rank: {odd}")


def _list(names: list[str], candidates: Any) -> str:
    shown = []
    for name in names[:_SHOWN]:
        close = nearest(name, candidates)
        shown.append(f"{name} (nearest: {close})" if close else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
