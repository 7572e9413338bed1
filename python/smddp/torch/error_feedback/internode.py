"""Rounding of a reduce_scatter's contributions to other nodes before the call, to record the rounding error.

A reduce_scatter rounds the sum of a node's contributions to each remote block when it leaves the node. The ranks of a
node therefore sum these blocks first; each rank rounds and contributes an equal part of the sum. Rounding is
idempotent, so the transfer changes nothing. Blocks for ranks of the same node are sent unrounded.
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
_FORMAT = re.compile(r"\((\w+) between nodes\)")


class InterNodeReduce:
    """The inter-node part of a group's reduce_scatter, and this rank's share of it."""

    def __init__(self, group: SmddpProcessGroup) -> None:
        self.comm = group.communicator
        nodes = self.comm.nodes()
        self.size, self.rank = self.comm.size, self.comm.rank
        mine = nodes[self.rank]
        self.remote = torch.tensor([rank for rank in range(self.size) if nodes[rank] != mine], dtype=torch.int64)
        self._local_peers = [rank for rank in range(self.size) if nodes[rank] == mine]
        self._several = len(set(nodes)) > 1
        self._group = weakref.ref(group)
        self._node: Any = None
        self._formats: dict[tuple[str, int], str | None] = {}

    def format(self, collective: str, count: int) -> str | None:
        """Returns the wire format between nodes for `count` float32 elements in host memory; None: unchanged.

        Reads the settings only; callers check `smddp.exact`.
        """
        if not self._several:
            return None
        key = (collective, count)
        if key not in self._formats:
            path = self.comm.path(COLLECTIVES.index(collective), CODES[torch.float32], _FLOAT * count)
            found = _FORMAT.search(path)
            self._formats[key] = found and found[1]
        return self._formats[key]

    def share(self, block: int) -> int | None:
        """Returns the number of rows of GROUP that this rank rounds; None without rounding. block: elements."""
        if self.format("reduce_scatter", block * self.size) is None:
            return None
        return -(-self._rows(block) // len(self._local_peers))

    def round(self, blocks: Tensor, residual: Tensor | None) -> Tensor | None:
        """Replaces `blocks` (size, block) by this rank's rounded contribution. Returns the new residual.

        residual and result: (share, GROUP) rounding errors; `residual` is added before rounding. A collective call of
        this node's ranks, if it has several. Without rounding, `blocks` and `residual` are unchanged.
        """
        format = self.format("reduce_scatter", blocks.numel())
        if format is None:
            return residual
        mine = self._summed(self._grouped(blocks.index_select(0, self.remote)))
        if residual is not None:
            mine += residual
        away = round_off(mine, format)
        blocks.index_copy_(0, self.remote, self.expanded(mine, blocks.shape[1]))
        return away

    def expanded(self, mine: Tensor, block: int) -> Tensor:
        """Returns this rank's rows of `round` at their places in the remote blocks (remote, block), else zeros."""
        rows, share = self._rows(block), mine.shape[0]
        if len(self._local_peers) > 1:
            before = share * self._local_peers.index(self.rank)
            mine = mine[: max(rows - before, 0)]
            mine = pad(mine, (0, 0, min(before, rows), max(rows - before - mine.shape[0], 0)))
        return mine.reshape(len(self.remote), -1)[:, :block]

    def _rows(self, block: int) -> int:
        return len(self.remote) * -(-block // GROUP)

    def _grouped(self, blocks: Tensor) -> Tensor:
        """Returns the blocks as rows of GROUP, each a group of the format, padded with zeros."""
        return pad(blocks, (0, -blocks.shape[1] % GROUP)).view(-1, GROUP)

    def _summed(self, rows: Tensor) -> Tensor:
        """Returns this rank's share of the sum of the node's rows."""
        count = len(self._local_peers)
        if count == 1:
            return rows
        mine = rows.new_empty(-(-len(rows) // count), GROUP)
        dist.reduce_scatter_tensor(mine, pad(rows, (0, 0, 0, count * len(mine) - len(rows))), group=self.node_group())
        return mine

    def node_group(self) -> Any:
        """Returns the group of this node's ranks, created on first use."""
        if self._node is None:
            ranks = dist.get_process_group_ranks(self._group())
            peers = [ranks[rank] for rank in self._local_peers]
            self._node = dist.new_group(peers, backend=NAME, use_local_synchronization=True)
        return self._node


_reduces: weakref.WeakKeyDictionary[SmddpProcessGroup, InterNodeReduce] = weakref.WeakKeyDictionary()


def internode_reduce(group: Any) -> InterNodeReduce | None:
    """Returns the inter-node part of a group (None: the default); None if smddp does not serve its CPU tensors.

    Raises ValueError without a default group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("no default process group; call init_process_group('smddp') first")
    if not isinstance(group, SmddpProcessGroup):
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return None
        if not isinstance(group, SmddpProcessGroup):
            return None
    known = _reduces.get(group)
    # `reconfigure` replaces the communicator.
    if known is None or known.comm is not group.communicator:
        known = _reduces[group] = InterNodeReduce(group)
    return known
