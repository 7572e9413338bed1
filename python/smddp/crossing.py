"""What a reduce_scatter sends to other nodes in a format, rounded beforehand, so that what is rounded away is known.

A reduce_scatter rounds the sum of a node's contributions to each block of another node, where it leaves the node. So
the ranks of a node sum those blocks first, and each rounds an equal part of the sum and contributes that alone. On
its way out it stays what it is, because a format changes nothing that it has rounded. Blocks of the own node's ranks do
not leave it, and stay as they are.
"""

from __future__ import annotations

import re
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from smddp._info import COLLECTIVES
from smddp._register import NAME
from smddp.dtypes import CODES
from smddp.process_group import SmddpProcessGroup
from smddp.rounding import GROUP, round_off

_FLOAT = 4
_TOLD = re.compile(r"\((\w+) between nodes\).*segments of (\d+) KiB")


class Way(NamedTuple):
    """How a collective of some size goes between nodes."""

    format: str
    # Elements after which groups of a format begin again.
    piece: int


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
        self._ways: dict[tuple[str, int], Way | None] = {}

    def way(self, collective: str, count: int) -> Way | None:
        """How float32 of the host goes between nodes, `count` elements in all; None where it goes as it is.

        By the settings: `smddp.exact` is the caller's to ask for.
        """
        if not self._several:
            return None
        key = (collective, count)
        if key not in self._ways:
            told = self.comm.path(COLLECTIVES.index(collective), CODES[torch.float32], _FLOAT * count)
            found = _TOLD.search(told)
            self._ways[key] = found and Way(found[1], _piece(found[1], int(found[2]), count // self.size))
        return self._ways[key]

    def share(self, block: int) -> int | None:
        """Rows of GROUP that this rank rounds of blocks of so many elements; None where nothing is rounded."""
        way = self.way("reduce_scatter", block * self.size)
        return way and -(-self._rows(block, way) // len(self._mates))

    def round(self, blocks: Tensor, owed: Tensor | None) -> Tensor | None:
        """Leaves in `blocks` (size, block) this rank's contribution to their reduce_scatter. Returns what it now owes.

        owed, and what is returned: (share, GROUP), what was rounded away before, which is added. Meets the ranks of
        this node where it has several. Where nothing is rounded, blocks and what is owed stay as they are.
        """
        way = self.way("reduce_scatter", blocks.numel())
        if way is None:
            return owed
        mine = self._summed(self._grouped(blocks.index_select(0, self.far), way))
        if owed is not None:
            mine += owed
        away = round_off(mine, way.format)
        blocks.index_copy_(0, self.far, self._laid(mine, blocks.shape[1], way))
        return away

    def expanded(self, owed: Tensor, block: int) -> Tensor:
        """What `round` returned, where it lies in the blocks of other nodes (far, block), and zeros."""
        way = self.way("reduce_scatter", block * self.size)
        assert way is not None
        return self._laid(owed, block, way)

    def _laid(self, mine: Tensor, block: int, way: Way) -> Tensor:
        """This rank's rows where they lie in those blocks."""
        rows, share = self._rows(block, way), mine.shape[0]
        if len(self._mates) > 1:
            before = share * self._mates.index(self.rank)
            mine = mine[: max(rows - before, 0)]
            mine = pad(mine, (0, 0, min(before, rows), max(rows - before - mine.shape[0], 0)))
        piece, pieces, width = _cut(block, way)
        laid = mine.reshape(len(self.far), pieces, width)[:, :, :piece]
        return laid.reshape(len(self.far), pieces * piece)[:, :block]

    def _rows(self, block: int, way: Way) -> int:
        _, pieces, width = _cut(block, way)
        return len(self.far) * pieces * width // GROUP

    def _grouped(self, blocks: Tensor, way: Way) -> Tensor:
        """Blocks as rows of GROUP, each a group of the format, filled up with zeros."""
        piece, pieces, width = _cut(blocks.shape[1], way)
        filled = pad(blocks, (0, pieces * piece - blocks.shape[1])).view(-1, piece)
        return pad(filled, (0, width - piece)).view(-1, GROUP)

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


def _cut(block: int, way: Way) -> tuple[int, int, int]:
    """A block's pieces: elements of one, how many, and elements of one in whole groups."""
    piece = min(way.piece, block)
    return piece, -(-block // piece), -(-piece // GROUP) * GROUP


def _piece(format: str, kib: int, block: int) -> int:
    """Elements of a segment, of which KiB are told, rounded up; GROUP where that gives the same groups.

    A segment is a quarter of a block, in whole cache lines, between bounds that are whole KiB. A quarter that is less
    than a KiB below the lower bound is taken for the segment; then the wire rounds once more.
    """
    line = 64 // _FLOAT
    quarter = -(-block // (4 * line)) * line
    told = 1024 * kib // _FLOAT
    segment = quarter if told - 1024 // _FLOAT < quarter <= told else told
    return GROUP if format != "int8" or segment % GROUP == 0 else segment


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
