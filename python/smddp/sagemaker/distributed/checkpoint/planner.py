"""DCP save planner that also supports groups with only a part of the model."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap, defaultdict
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan


class SavePlanner(DefaultSavePlanner):
    """Plans a save by a process group.

    Args:
        lowest_rank: what several ranks hold is written by the first of them; if False, by the one with the least to
            write.
        whole: the group holds every tensor as a whole, so a gap is an error. False where each tensor-parallel rank
            saves its part.
    """

    def __init__(self, lowest_rank: bool = False, whole: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._lowest_rank, self._whole = lowest_rank, whole

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assigns each write to a rank, and returns the plans with the global metadata.

        Raises:
            ValueError: parts of a tensor are missing or overlap.
        """
        plans, metadata = create_default_global_save_plan(_once(all_plans, self._lowest_rank))
        if self.flatten_state_dict:
            metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*(p.planner_data for p in plans))))
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                size = math.prod(entry.size)
                if held > size or (self._whole and held < size):
                    raise ValueError(
                        f"the ranks that save hold {held} of the {size} elements of {name}: save with the process "
                        "group whose ranks together hold each tensor once"
                    )
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata


def _once(plans: list[SavePlan], lowest_rank: bool) -> list[SavePlan]:
    """Removes duplicates from ``plans``: one rank keeps each entry that several ranks hold."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
    kept: list[list] = [[] for _ in plans]
    load = [0] * len(plans)
    for plan in plans:
        for item in plan.items:
            among = holders.pop(item.index, None)
            if among is None:
                continue
            writer = min(among) if lowest_rank else min(among, key=lambda r: load[r])
            load[writer] += item.tensor_storage_size() or 1
            kept[writer].append(item)
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept)]
