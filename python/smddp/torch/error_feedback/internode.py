"""What a reduce_scatter sends to other nodes in a format, rounded beforehand, so that what is rounded away is known.

A reduce_scatter rounds the sum of a node's contributions to each block of another node, where it leaves the node. So
the ranks of a node sum those blocks first, and each rounds an equal part of the sum and contributes that alone. On
its way out it stays what it is, because a format changes nothing that it has rounded. Blocks of the own node's ranks do
not leave it, and stay as they are.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from smddp._constants import NAME
from smddp.observability.info import COLLECTIVES
from smddp.torch.dtypes import CODES
from smddp.torch.error_feedback.rounding import GROUP, round_off
from smddp.torch.process_group import SmddpProcessGroup

_FLOAT = 4
_TOLD = re.compile(r"\((\w+) between nodes\)")


class Crossing:
    """Which part of a group's reduce_scatter leaves this node, and this rank's share in it."""

    def __init__(self, group: SmddpProcessGroup) -> None:
        self.comm = group.communicator
        nodes = self.comm.nodes()
        self.size, self.rank = self.comm.size, self.comm.rank
        mine = nodes[self.rank]
        self.far = torch.tensor([rank for rank in range(self.size) if nodes[rank] != mine], dtype=torch.int64)
        self._mates = [rank for rank in range(self.size) if nodes[rank] == mine]
        self._several = len(set(nodes)) > 1
        self._group = weakref.ref(group)
        self._node: Any = None
        self._formats: dict[tuple[str, int], str | None] = {}

    def format(self, collective: str, count: int) -> str | None:
        """In what float32 of the host goes between nodes, `count` elements in all; None where it goes as it is.

        By the settings: `smddp.exact` is the caller's to ask for.
        """
        if not self._several:
            return None
        key = (collective, count)
        if key not in self._formats:
            told = self.comm.path(COLLECTIVES.index(collective), CODES[torch.float32], _FLOAT * count)
            found = _TOLD.search(told)
            self._formats[key] = found and found[1]
        return self._formats[key]

    def share(self, block: int) -> int | None:
        """Rows of GROUP that this rank rounds of blocks of so many elements; None where nothing is rounded."""
        if self.format("reduce_scatter", block * self.size) is None:
            return None
        return -(-self._rows(block) // len(self._mates))

    def round(self, blocks: Tensor, owed: Tensor | None) -> Tensor | None:
        """Leaves in `blocks` (size, block) this rank's contribution to their reduce_scatter. Returns what it now owes.

        owed, and what is returned: (share, GROUP), what was rounded away before, which is added. Meets the ranks of
        this node where it has several. Where nothing is rounded, blocks and what is owed stay as they are.
        """
        format = self.format("reduce_scatter", blocks.numel())
        if format is None:
            return owed
        mine = self._summed(self._grouped(blocks.index_select(0, self.far)))
        if owed is not None:
            mine += owed
        away = round_off(mine, format)
        blocks.index_copy_(0, self.far, self.expanded(mine, blocks.shape[1]))
        return away

    def expanded(self, mine: Tensor, block: int) -> Tensor:
        """This rank's rows, as `round` returns them, where they lie in other nodes' blocks (far, block), and zeros."""
        rows, share = self._rows(block), mine.shape[0]
        if len(self._mates) > 1:
            before = share * self._mates.index(self.rank)
            mine = mine[: max(rows - before, 0)]
            mine = pad(mine, (0, 0, min(before, rows), max(rows - before - mine.shape[0], 0)))
        return mine.reshape(len(self.far), -1)[:, :block]

    def _rows(self, block: int) -> int:
        return len(self.far) * -(-block // GROUP)

    def _grouped(self, blocks: Tensor) -> Tensor:
        """Blocks as rows of GROUP, each a group of the format, filled up with zeros."""
        return pad(blocks, (0, -blocks.shape[1] % GROUP)).view(-1, GROUP)

    def _summed(self, rows: Tensor) -> Tensor:
        """This rank's share of the sum of the node's rows."""
        mates = len(self._mates)
        if mates == 1:
            return rows
        mine = rows.new_empty(-(-len(rows) // mates), GROUP)
        dist.reduce_scatter_tensor(mine, pad(rows, (0, 0, 0, mates * len(mine) - len(rows))), group=self.node_group())
        return mine

    def node_group(self) -> Any:
        """The group of this node's ranks, which they make when they first need it."""
        if self._node is None:
            ranks = dist.get_process_group_ranks(self._group())
            mates = [ranks[rank] for rank in self._mates]
            self._node = dist.new_group(mates, backend=NAME, use_local_synchronization=True)
        return self._node


_crossings: weakref.WeakKeyDictionary[SmddpProcessGroup, Crossing] = weakref.WeakKeyDictionary()


def crossing(group: Any) -> Crossing | None:
    """Of a group as torch has it, None for the default; None where it is not smddp's for CPU tensors.

    Raises ValueError where there is no default group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("there is no default process group; init_process_group('smddp') makes one")
    if not isinstance(group, SmddpProcessGroup):
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return None
        if not isinstance(group, SmddpProcessGroup):
            return None
    known = _crossings.get(group)
    # A group that was made anew with other ranks has another communicator.
    if known is None or known.comm is not group.communicator:
        known = _crossings[group] = Crossing(group)
    return known
