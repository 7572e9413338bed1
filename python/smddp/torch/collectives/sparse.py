"""all_reduce of sparse tensors: gathered, and added up by every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, Work

from smddp.arrays.composite import one_call
from smddp.torch.arguments import block, one
from smddp.torch.collectives.base import ALL_GATHER, Base
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import BXOR, SUM, code_of, reduction
from smddp.torch.options import gather_options
from smddp.torch.work import DoneWork

# The mark of the parts in the core (`key.rs`): a plain all_gather of another rank differs from them.
_SPARSE = BXOR


class SparseAllReduce(Base):
    """all_reduce of sparse COO tensors."""

    @collective("all_reduce_sparse")
    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = gather_options(AllreduceOptions, opts)
        tensor = one(tensors, "sparse all_reduce")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).allreduce_sparse(tensors, opts)
        return self._allreduce_sparse(tensor, opts)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        """Gathers all ranks' entries and adds them up in rank order, as every rank's own copy.

        The sizes must be known before the entries can move, so this runs to its end also where the caller
        asked for a handle.
        """
        if self._estimate is not None:
            raise NotImplementedError("smddp cannot estimate a sparse all_reduce: its sizes come from the other ranks")
        if tensor.layout != torch.sparse_coo:
            self._check_strided(tensor)
        number, _ = reduction(opts.reduceOp, tensor.dtype, code_of(tensor.dtype))
        if number != SUM:
            raise ValueError(f"sparse all_reduce can only sum, got {opts.reduceOp.op}")
        mine = tensor.detach().coalesce()
        with one_call(self._comm, "a sparse all_reduce"):
            places, values, difference = self._gather_entries(mine, opts.timeout.total_seconds())
        if difference is not None:  # on all ranks alike
            raise ValueError(difference)
        total = torch.sparse_coo_tensor(
            torch.cat(places).t(),
            torch.cat(values),
            mine.shape,
            device="cpu",
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return self._note(DoneWork([tensor]))

    def _gather_entries(self, mine: Tensor, limit: float) -> tuple[list[Tensor], list[Tensor], str | None]:
        """Returns the indices, a row for each entry, and the values of all ranks, in rank order; the error's text, and
        nothing else, where shapes differ.

        limit: seconds for all parts; 0: the group's timeout for each.
        """
        end = time.monotonic() + limit if limit > 0 else None
        head = _numbers(mine._nnz(), mine.sparse_dim(), mine.dense_dim(), *mine.shape)
        # Ranks may even disagree about the number of dimensions, which must be an error and not a hang.
        width = self._gather_now(_numbers(head.numel()), [(1,)] * self._size, end)
        heads = self._gather_now(head, [(int(count),) for count in width], end)
        for rank, other in enumerate(heads):
            if other[1:].tolist() != head[1:].tolist():
                return (
                    [],
                    [],
                    f"sparse all_reduce: this rank's (sparse dims, dense dims, shape) {head[1:].tolist()} differ from "
                    f"{other[1:].tolist()} of rank {rank}",
                )
        entries = [int(other[0]) for other in heads]
        places = self._gather_now(mine.indices().t().contiguous(), [(n, mine.sparse_dim()) for n in entries], end)
        row = mine.shape[mine.sparse_dim() :]
        return places, self._gather_now(mine.values().contiguous(), [(n, *row) for n in entries], end), None

    def _gather_now(self, mine: Tensor, shapes: Sequence[tuple[int, ...]], end: float | None) -> list[Tensor]:
        """Returns all ranks' tensors, which have these shapes, in rank order. end: on the monotonic clock."""
        parts = [torch.empty(shape, dtype=mine.dtype, device="cpu") for shape in shapes]
        limit = 0.0 if end is None else max(end - time.monotonic(), 1e-6)
        targets = [block(part) for part in parts]
        self._comm.collective(
            ALL_GATHER, code_of(mine.dtype), _SPARSE, 1.0, 0, block(mine), targets, (mine, parts), limit, False
        )
        return parts


def _numbers(*values: int) -> Tensor:
    # The device is named because programs may set another default.
    return torch.tensor(values, dtype=torch.int64, device="cpu")
