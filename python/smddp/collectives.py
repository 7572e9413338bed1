"""torch's collectives on the native core.

`SmddpCollectives` is a mixin that does not know which torch class it serves. It has every c10d method under
all names that torch 2.5 and later use. Arguments are checked before anything moves, so a ValueError or a
TypeError leaves the group as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import Work

from smddp.dtypes import CODES, SUM, code_of, reduction
from smddp.errors import translate
from smddp.options import gather_options
from smddp.profiling import collective
from smddp.selfsend import Mailbox
from smddp.tensors import (
    block,
    check_dtype,
    check_length,
    check_writable,
    describe,
    landing,
    one,
    readable,
    split_counts,
)
from smddp.work import DoneWork, SmddpWork, join

# The numbers of smddp_plan::Collective.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, BARRIER = range(9)

_UINT8 = CODES[torch.uint8]
_ANY_SOURCE = -1
_ZERO = timedelta(0)

After = list[Callable[[], None]]


class _Batch:
    """An open coalescing block: what its thread started since."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.works: list[Work] = []


class SmddpCollectives:
    """The collectives of one group. The class that uses it sets the attributes below."""

    _comm: Any
    _rank: int
    _size: int
    # Global ranks, where they differ from the ranks in the group.
    _ranks: Sequence[int] | None
    # Backends of the devices that are not ours, by device type.
    _others: dict[str, Any]
    _serves_cpu: bool
    _mailbox: Mailbox
    _timeout: timedelta
    _batch: _Batch | None = None

    # What every call goes through

    def _failed(self, error: BaseException) -> BaseException:
        """Called with everything that a public method raises; returns what is to be raised."""
        if self._batch is not None:
            self._batch = None
            self._forget_coalescing()
        return translate(error, self._ranks)

    def _forget_coalescing(self) -> None:
        """Take an open block out of torch's own state too, or it would queue every later call in silence."""

    def _elsewhere(self, tensor: Tensor) -> Any:
        """The backend that serves the tensor's device. Raises RuntimeError where there is none."""
        kind = tensor.device.type
        backend = self._others.get(kind)
        if backend is None and kind == "cpu":
            raise RuntimeError(
                f"this group has no backend for CPU tensors ({describe(tensor)}); make it with "
                "init_process_group('smddp'), or name one: 'cpu:smddp,...'"
            )
        if backend is None:
            raise RuntimeError(
                f"smddp moves CPU tensors; this one is on {tensor.device} ({describe(tensor)}). Move it to the CPU, "
                f"or give {kind} to a backend that serves it: "
                f"init_process_group('cpu:smddp,{kind}:{'nccl' if kind == 'cuda' else 'BACKEND'}')."
            )
        return backend

    def _check_strided(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            raise ValueError(f"smddp moves dense tensors; this one has layout {tensor.layout} ({describe(tensor)})")

    def _check_all_here(self, what: str, first: Tensor, others: Sequence[Tensor]) -> None:
        """All on the CPU and dense, with the dtype of `first`."""
        self._check_strided(first)
        for index, tensor in enumerate(others):
            if not tensor.is_cpu:
                raise ValueError(
                    f"{what}: tensors must be on one device, got {first.device} and {tensor.device} (tensor {index})"
                )
            self._check_strided(tensor)
        check_dtype(what, first, others)

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(f"{what}: invalid root rank {root} in a group of {self._size} ranks")

    def _start(
        self,
        number: int,
        code: int,
        redop: tuple[int, float],
        root: int,
        source: Any,
        target: Any,
        keep: object,
        options: Any,
        outputs: list[Tensor],
        after: After,
    ) -> Work:
        """Hand one call to the core; a caller that would wait at once is served on the spot."""
        timeout = options.timeout
        limit = timeout.total_seconds() if timeout > _ZERO else 0.0
        if self._batch is None and not getattr(options, "asyncOp", True):
            self._comm.collective(number, code, redop[0], redop[1], root, source, target, keep, limit, False)
            for step in after:
                step()
            return DONE
        native = self._comm.collective(number, code, redop[0], redop[1], root, source, target, keep, limit, True)
        return self._note(SmddpWork(native, outputs, after, self._ranks))

    def _note(self, work: Work) -> Work:
        batch = self._batch
        if batch is not None and batch.thread == threading.get_ident():
            batch.works.append(work)
        return work

    # all_reduce

    @collective("all_reduce")
    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if type(opts) is not AllreduceOptions:
            opts = gather_options(AllreduceOptions, opts, op, timeout)
        tensor = one(tensors, "all_reduce")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).allreduce(tensors, opts)
        if tensor.layout != torch.strided:
            return self._allreduce_sparse(tensor, opts)
        return self._allreduce(tensor, opts)

    def _allreduce(self, tensor: Tensor, opts: Any) -> Work:
        code = code_of(tensor.dtype)
        redop = reduction(opts.reduceOp, tensor.dtype, code)
        after: After = []
        buffer = landing(tensor, after, keep_values=True)
        place = block(buffer)
        return self._start(ALL_REDUCE, code, redop, 0, place, place, (tensor, buffer), opts, [tensor], after)

    @collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        if type(opts) is not AllreduceCoalescedOptions:
            opts = gather_options(AllreduceCoalescedOptions, opts)
        if not tensors:
            raise ValueError("all_reduce_coalesced: needs at least one tensor")
        if not (tensors[0].is_cpu and self._serves_cpu):
            return self._elsewhere(tensors[0]).allreduce_coalesced(tensors, opts)
        for tensor in tensors:
            self._check_all_here("all_reduce_coalesced", tensors[0], (tensor,))
            check_writable(tensor)
        return join([self._allreduce(tensor, opts) for tensor in tensors], list(tensors))

    @collective("all_reduce_sparse")
    def allreduce_sparse(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = gather_options(AllreduceOptions, opts)
        tensor = one(tensors, "sparse all_reduce")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).allreduce_sparse(tensors, opts)
        return self._allreduce_sparse(tensor, opts)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        """Gathers all ranks' entries and adds them up in rank order, as every rank's own copy.

        The sizes must be known before the entries can move, so this runs to its end also where the caller
        asked for a handle.
        """
        if tensor.layout != torch.sparse_coo:
            self._check_strided(tensor)
        number, _ = reduction(opts.reduceOp, tensor.dtype, code_of(tensor.dtype))
        if number != SUM:
            raise ValueError(f"sparse all_reduce can only sum, got {opts.reduceOp.op}")
        mine = tensor.detach().coalesce()
        head = torch.tensor([mine._nnz(), mine.sparse_dim(), mine.dense_dim(), *mine.shape], dtype=torch.int64)
        # Ranks may even disagree about the number of dimensions, which must be an error and not a hang.
        width = self._gather_now(torch.tensor([head.numel()], dtype=torch.int64), [1] * self._size)
        heads = self._gather_now(head, [int(count) for count in width])
        for rank, other in enumerate(heads):
            if other[1:].tolist() != head[1:].tolist():
                raise ValueError(
                    f"sparse all_reduce: this rank's (sparse dims, dense dims, shape) {head[1:].tolist()} differ from "
                    f"{other[1:].tolist()} of rank {rank}"
                )
        entries = [int(other[0]) for other in heads]
        places = self._gather_now(mine.indices().t().contiguous(), [n * mine.sparse_dim() for n in entries])
        row = mine.values()[0].numel() if entries[self._rank] else _product(mine.shape[mine.sparse_dim() :])
        values = self._gather_now(mine.values().contiguous(), [n * row for n in entries])
        total = torch.sparse_coo_tensor(
            torch.cat([p.view(-1, mine.sparse_dim()) for p in places]).t(),
            torch.cat([v.view(-1, *mine.shape[mine.sparse_dim() :]) for v in values]),
            mine.shape,
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return self._note(DoneWork([tensor]))

    def _gather_now(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """All ranks' flat tensors of these element counts, in rank order."""
        parts = [torch.empty(count, dtype=mine.dtype) for count in counts]
        targets = [block(part) for part in parts]
        self._comm.collective(
            ALL_GATHER, code_of(mine.dtype), SUM, 1.0, 0, block(mine), targets, (mine, parts), 0.0, False
        )
        return parts

    # broadcast, reduce

    @collective("broadcast")
    def broadcast(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if type(opts) is not BroadcastOptions:
            opts = gather_options(BroadcastOptions, opts, root, timeout)
        tensor = one(tensors, "broadcast")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).broadcast(tensors, opts)
        self._check_strided(tensor)
        chief = opts.rootRank
        self._check_root("broadcast", chief)
        after: After = []
        if chief == self._rank:
            buffer = readable(tensor)
            source = target = block(buffer)
        else:
            buffer = landing(tensor, after)
            source, target = None, block(buffer)
        return self._start(
            BROADCAST, code_of(tensor.dtype), _PLAIN, chief, source, target, (tensor, buffer), opts, [tensor], after
        )

    @collective("reduce")
    def reduce(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if type(opts) is not ReduceOptions:
            opts = gather_options(ReduceOptions, opts, root, op, timeout)
        tensor = one(tensors, "reduce")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).reduce(tensors, opts)
        self._check_strided(tensor)
        chief = opts.rootRank
        self._check_root("reduce", chief)
        code = code_of(tensor.dtype)
        redop = reduction(opts.reduceOp, tensor.dtype, code)
        after: After = []
        if chief == self._rank:
            buffer = landing(tensor, after, keep_values=True)
            source = target = block(buffer)
        else:
            buffer = readable(tensor)
            source, target = block(buffer), None
        return self._start(REDUCE, code, redop, chief, source, target, (tensor, buffer), opts, [tensor], after)

    # all_gather

    @collective("all_gather")
    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not AllgatherOptions:
            opts = gather_options(AllgatherOptions, opts, timeout)
        tensor = one(input_tensors, "all_gather")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).allgather(output_tensors, input_tensors, opts)
        outputs = one(output_tensors, "all_gather: output lists")
        return self._allgather("all_gather", outputs, tensor, opts)

    def _allgather(self, what: str, outputs: Sequence[Tensor], tensor: Tensor, opts: Any) -> Work:
        check_length(f"{what}: the output list", outputs, self._size)
        self._check_all_here(what, tensor, outputs)
        own = outputs[self._rank]
        if own.numel() != tensor.numel():
            raise ValueError(
                f"{what}: entry {self._rank} of the output list, {describe(own)}, must have as many elements as this "
                f"rank's input, {describe(tensor)}"
            )
        after: After = []
        buffers = [landing(output, after) for output in outputs]
        source = readable(tensor)
        return self._start(
            ALL_GATHER,
            code_of(tensor.dtype),
            _PLAIN,
            0,
            block(source),
            [block(buffer) for buffer in buffers],
            (outputs, buffers, source),
            opts,
            list(outputs),
            after,
        )

    @collective("all_gather_single")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        if type(opts) is not AllgatherOptions:
            opts = gather_options(AllgatherOptions, opts)
        if not (input.is_cpu and self._serves_cpu):
            return _first(self._elsewhere(input), "all_gather_single", "_allgather_base")(output, input, opts)
        return self._all_gather_single("all_gather_into_tensor", output, input, opts)

    _allgather_base = all_gather_single

    def _all_gather_single(self, what: str, output: Tensor, input: Tensor, opts: Any) -> Work:
        self._check_all_here(what, input, (output,))
        if output.numel() != input.numel() * self._size:
            raise ValueError(
                f"{what}: output tensor size must be equal to world_size times input tensor size: output "
                f"{describe(output)} has {output.numel()} elements, {self._size} times input {describe(input)} "
                f"makes {input.numel() * self._size}"
            )
        after: After = []
        buffer = landing(output, after)
        source = readable(input)
        return self._start(
            ALL_GATHER,
            code_of(input.dtype),
            _PLAIN,
            0,
            block(source),
            block(buffer),
            (output, buffer, source),
            opts,
            [output],
            after,
        )

    @collective("all_gather_coalesced")
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """output_lists[r][k] gets input_list[k] of rank r."""
        opts = gather_options(AllgatherOptions, opts)
        if not input_list:
            raise ValueError("all_gather_coalesced: needs at least one tensor")
        if not (input_list[0].is_cpu and self._serves_cpu):
            return self._elsewhere(input_list[0]).allgather_coalesced(output_lists, input_list, opts)
        check_length("all_gather_coalesced: the output lists", output_lists, self._size)
        for rank, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                raise ValueError(
                    f"all_gather_coalesced: output list {rank} has {len(outputs)} tensors, the input list has "
                    f"{len(input_list)}"
                )
        # All are checked before the first moves.
        for index, tensor in enumerate(input_list):
            outputs = [of_rank[index] for of_rank in output_lists]
            self._check_all_here("all_gather_coalesced", tensor, outputs)
            for output in outputs:
                check_writable(output)
                if output.numel() != tensor.numel():
                    raise ValueError(
                        f"all_gather_coalesced: output {describe(output)} does not fit input {describe(tensor)}"
                    )
        works = [
            self._allgather("all_gather_coalesced", [of_rank[index] for of_rank in output_lists], tensor, opts)
            for index, tensor in enumerate(input_list)
        ]
        return join(works, [output for outputs in output_lists for output in outputs])

    @collective("all_gather_single_coalesced")
    def all_gather_single_coalesced(
        self, output_lists: Sequence[Tensor], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = gather_options(AllgatherOptions, opts)
        what = "all_gather_into_tensor_coalesced"
        _check_pairs(what, output_lists, input_list)
        if not (input_list[0].is_cpu and self._serves_cpu):
            other = self._elsewhere(input_list[0])
            return _first(other, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")(
                output_lists, input_list, opts
            )
        for output, tensor in zip(output_lists, input_list, strict=True):
            self._check_all_here(what, tensor, (output,))
            check_writable(output)
            if output.numel() != tensor.numel() * self._size:
                raise ValueError(
                    f"{what}: output {describe(output)} must have {self._size} times the elements of input "
                    f"{describe(tensor)}"
                )
        works = [
            self._all_gather_single(what, output, tensor, opts)
            for output, tensor in zip(output_lists, input_list, strict=True)
        ]
        return join(works, list(output_lists))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # reduce_scatter

    @collective("reduce_scatter")
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor] | Tensor,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not ReduceScatterOptions:
            opts = gather_options(ReduceScatterOptions, opts, op, timeout)
        output = one(output_tensors, "reduce_scatter")
        if not (output.is_cpu and self._serves_cpu):
            return self._elsewhere(output).reduce_scatter(output_tensors, input_tensors, opts)
        inputs = one(input_tensors, "reduce_scatter: input lists")
        check_length("reduce_scatter: the input list", inputs, self._size)
        self._check_all_here("reduce_scatter", output, inputs)
        own = inputs[self._rank]
        if own.numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: entry {self._rank} of the input list, {describe(own)}, must have as many elements as "
                f"this rank's output, {describe(output)}"
            )
        code = code_of(output.dtype)
        redop = reduction(opts.reduceOp, output.dtype, code)
        after: After = []
        buffer = landing(output, after)
        sources = [readable(tensor) for tensor in inputs]
        return self._start(
            REDUCE_SCATTER,
            code,
            redop,
            0,
            [block(source) for source in sources],
            block(buffer),
            (output, buffer, sources),
            opts,
            [output],
            after,
        )

    @collective("reduce_scatter_single")
    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        if type(opts) is not ReduceScatterOptions:
            opts = gather_options(ReduceScatterOptions, opts)
        if not (inputTensor.is_cpu and self._serves_cpu):
            other = self._elsewhere(inputTensor)
            return _first(other, "reduce_scatter_single", "_reduce_scatter_base")(outputTensor, inputTensor, opts)
        return self._reduce_scatter_single("reduce_scatter_tensor", outputTensor, inputTensor, opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter_single(self, what: str, output: Tensor, input: Tensor, opts: Any) -> Work:
        self._check_all_here(what, output, (input,))
        if input.numel() != output.numel() * self._size:
            raise ValueError(
                f"{what}: input tensor must be the same size as output size times world size: input {describe(input)} "
                f"has {input.numel()} elements, {self._size} times output {describe(output)} makes "
                f"{output.numel() * self._size}"
            )
        code = code_of(output.dtype)
        redop = reduction(opts.reduceOp, output.dtype, code)
        after: After = []
        buffer = landing(output, after)
        source = readable(input)
        return self._start(
            REDUCE_SCATTER,
            code,
            redop,
            0,
            block(source),
            block(buffer),
            (output, buffer, source),
            opts,
            [output],
            after,
        )

    @collective("reduce_scatter_single_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputTensors: Sequence[Tensor], inputTensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = gather_options(ReduceScatterOptions, opts)
        what = "reduce_scatter_tensor_coalesced"
        _check_pairs(what, outputTensors, inputTensors)
        if not (inputTensors[0].is_cpu and self._serves_cpu):
            other = self._elsewhere(inputTensors[0])
            return _first(other, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")(
                outputTensors, inputTensors, opts
            )
        for output, tensor in zip(outputTensors, inputTensors, strict=True):
            self._check_all_here(what, output, (tensor,))
            check_writable(output)
            reduction(opts.reduceOp, output.dtype, code_of(output.dtype))
            if tensor.numel() != output.numel() * self._size:
                raise ValueError(
                    f"{what}: input {describe(tensor)} must have {self._size} times the elements of output "
                    f"{describe(output)}"
                )
        works = [
            self._reduce_scatter_single(what, output, tensor, opts)
            for output, tensor in zip(outputTensors, inputTensors, strict=True)
        ]
        return join(works, list(outputTensors))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # gather, scatter

    @collective("gather")
    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        if type(opts) is not GatherOptions:
            opts = gather_options(GatherOptions, opts, root, timeout)
        tensor = one(input_tensors, "gather")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).gather(output_tensors, input_tensors, opts)
        self._check_strided(tensor)
        chief = opts.rootRank
        self._check_root("gather", chief)
        after: After = []
        outputs: Sequence[Tensor] = []
        target: Any = None
        buffers: list[Tensor] = []
        if chief == self._rank:
            outputs = one(output_tensors, "gather: output lists at the root")
            check_length("gather: the output list", outputs, self._size)
            self._check_all_here("gather", tensor, outputs)
            if outputs[chief].numel() != tensor.numel():
                raise ValueError(
                    f"gather: entry {chief} of the output list, {describe(outputs[chief])}, must have as many elements "
                    f"as the root's input, {describe(tensor)}"
                )
            buffers = [landing(output, after) for output in outputs]
            target = [block(buffer) for buffer in buffers]
        elif any(len(outputs) for outputs in output_tensors):
            raise ValueError(f"gather: only the root (rank {chief}) has outputs, this is rank {self._rank}")
        source = readable(tensor)
        return self._start(
            GATHER,
            code_of(tensor.dtype),
            _PLAIN,
            chief,
            block(source),
            target,
            (outputs, buffers, source),
            opts,
            list(outputs),
            after,
        )

    @collective("gather_single")
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = gather_options(GatherOptions, opts)
        if not (input.is_cpu and self._serves_cpu):
            return _first(self._elsewhere(input), "gather_single", "gather_into_tensor")(output, input, opts)
        self._check_strided(input)
        chief = opts.rootRank
        self._check_root("gather_into_tensor", chief)
        after: After = []
        buffer, target = output, None
        if chief == self._rank:
            self._check_all_here("gather_into_tensor", input, (output,))
            if output.numel() != input.numel() * self._size:
                raise ValueError(
                    f"gather_into_tensor: output {describe(output)} must have {self._size} times the elements of input "
                    f"{describe(input)}"
                )
            buffer = landing(output, after)
            target = block(buffer)
        source = readable(input)
        return self._start(
            GATHER,
            code_of(input.dtype),
            _PLAIN,
            chief,
            block(source),
            target,
            (output, buffer, source),
            opts,
            [output],
            after,
        )

    gather_into_tensor = gather_single

    @collective("scatter")
    def scatter(
        self,
        output_tensors: Sequence[Tensor] | Tensor,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        if type(opts) is not ScatterOptions:
            opts = gather_options(ScatterOptions, opts, root, timeout)
        output = one(output_tensors, "scatter")
        if not (output.is_cpu and self._serves_cpu):
            return self._elsewhere(output).scatter(output_tensors, input_tensors, opts)
        self._check_strided(output)
        chief = opts.rootRank
        self._check_root("scatter", chief)
        sources: list[Tensor] = []
        source: Any = None
        if chief == self._rank:
            inputs = one(input_tensors, "scatter: input lists at the root")
            check_length("scatter: the input list", inputs, self._size)
            self._check_all_here("scatter", output, inputs)
            if inputs[chief].numel() != output.numel():
                raise ValueError(
                    f"scatter: entry {chief} of the input list, {describe(inputs[chief])}, must have as many elements "
                    f"as the root's output, {describe(output)}"
                )
            sources = [readable(tensor) for tensor in inputs]
            source = [block(tensor) for tensor in sources]
        elif any(len(inputs) for inputs in input_tensors):
            raise ValueError(f"scatter: only the root (rank {chief}) has inputs, this is rank {self._rank}")
        after: After = []
        buffer = landing(output, after)
        return self._start(
            SCATTER,
            code_of(output.dtype),
            _PLAIN,
            chief,
            source,
            block(buffer),
            (output, buffer, sources),
            opts,
            [output],
            after,
        )

    # all_to_all

    @collective("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if type(opts) is not AllToAllOptions:
            opts = gather_options(AllToAllOptions, opts, timeout)
        if not (input.is_cpu and self._serves_cpu):
            return _first(self._elsewhere(input), "all_to_all_single", "alltoall_base")(
                output, input, output_split_sizes, input_split_sizes, opts
            )
        what = "all_to_all_single"
        self._check_all_here(what, input, (output,))
        sends = split_counts(f"{what}: input", input, input_split_sizes, self._size)
        receives = split_counts(f"{what}: output", output, output_split_sizes, self._size)
        if sends is None and receives is None:
            if input.numel() != output.numel():
                raise ValueError(
                    f"{what}: without split sizes input and output must have as many elements, got {describe(input)} "
                    f"and {describe(output)}"
                )
        else:
            # One uneven side makes the call uneven.
            sends = sends or [input.numel() // self._size] * self._size
            receives = receives or [output.numel() // self._size] * self._size
            if sends[self._rank] != receives[self._rank]:
                raise ValueError(
                    f"{what}: this rank sends itself {sends[self._rank]} elements and expects "
                    f"{receives[self._rank]} from itself"
                )
        after: After = []
        buffer = landing(output, after)
        source = readable(input)
        return self._start(
            ALL_TO_ALL,
            code_of(input.dtype),
            _PLAIN,
            0,
            block(source) if sends is None else (source.data_ptr(), sends),
            block(buffer) if receives is None else (buffer.data_ptr(), receives),
            (output, buffer, source),
            opts,
            [output],
            after,
        )

    alltoall_base = all_to_all_single

    @collective("all_to_all")
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if type(opts) is not AllToAllOptions:
            opts = gather_options(AllToAllOptions, opts, timeout)
        check_length("all_to_all: the input list", input_tensors, self._size)
        check_length("all_to_all: the output list", output_tensors, self._size)
        if not (input_tensors[0].is_cpu and self._serves_cpu):
            return self._elsewhere(input_tensors[0]).alltoall(output_tensors, input_tensors, opts)
        self._check_all_here("all_to_all", input_tensors[0], (*input_tensors, *output_tensors))
        own_in, own_out = input_tensors[self._rank], output_tensors[self._rank]
        if own_in.numel() != own_out.numel():
            raise ValueError(
                f"all_to_all: this rank sends itself {describe(own_in)} and expects {describe(own_out)} from itself"
            )
        after: After = []
        buffers = [landing(output, after) for output in output_tensors]
        sources = [readable(tensor) for tensor in input_tensors]
        return self._start(
            ALL_TO_ALL,
            code_of(own_in.dtype),
            _PLAIN,
            0,
            [block(source) for source in sources],
            [block(buffer) for buffer in buffers],
            (output_tensors, buffers, sources),
            opts,
            list(output_tensors),
            after,
        )

    # Point to point

    @collective("send")
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        tensor = one(tensors, "send")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).send(tensors, dstRank, tag)
        self._check_strided(tensor)
        self._check_peer("send", dstRank, tag)
        source = readable(tensor)
        if dstRank == self._rank:
            self._mailbox.send(source, tag)
            return self._note(DoneWork([tensor]))
        native = self._comm.send(block(source), code_of(tensor.dtype), dstRank, tag, (source,), 0.0)
        return self._note(SmddpWork(native, [tensor], (), self._ranks))

    @collective("recv")
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        tensor = one(tensors, "recv")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).recv(tensors, srcRank, tag)
        self._check_peer("recv", srcRank, tag)
        return self._receive(tensor, srcRank, tag)

    @collective("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        tensor = one(tensors, "recv")
        if not (tensor.is_cpu and self._serves_cpu):
            return self._elsewhere(tensor).recv_anysource(tensors, tag)
        self._check_peer("recv", 0, tag)
        return self._receive(tensor, _ANY_SOURCE, tag)

    # The name that torch's C++ side looks up.
    recvAnysource = recv_anysource

    def _receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        self._check_strided(tensor)
        after: After = []
        buffer = landing(tensor, after)
        if source == self._rank:
            native = self._mailbox.receive(buffer, tag, self._timeout.total_seconds())
        else:
            native = self._comm.recv(block(buffer), code_of(tensor.dtype), source, tag, (tensor, buffer), 0.0)
        return self._note(SmddpWork(native, [tensor], after, self._ranks))

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self._size:
            raise ValueError(f"{what}: invalid rank {peer} in a group of {self._size} ranks")
        if tag < 0:
            raise ValueError(f"{what}: tags must not be negative, got {tag}")

    # barrier

    @collective("barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if type(opts) is not BarrierOptions:
            opts = gather_options(BarrierOptions, opts, timeout)
        if self._others:
            # torch names the device whose backend should meet.
            device = getattr(opts, "device", None)
            other = self._others.get(device.type) if device is not None else None
            if other is not None:
                return other.barrier(opts)
        return self._start(BARRIER, _UINT8, _PLAIN, 0, None, None, None, opts, [], [])

    # Coalescing. torch's own spelling in Python has an underscore; its C++ side looks for the one without.

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls of this thread on this group are one handle, up to `_end_coalescing`."""
        other = self._others.get(device.type)
        if other is not None:
            other._start_coalescing()
            return
        if self._batch is not None:
            raise RuntimeError("smddp: a coalescing block is open in this group already")
        self._batch = _Batch()

    def _end_coalescing(self, device: torch.device) -> Work:
        other = self._others.get(device.type)
        if other is not None:
            return other._end_coalescing()
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("smddp: no coalescing block is open in this group")
        return join(batch.works) if batch.works else DONE

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


_PLAIN = (SUM, 1.0)

# For callers that wait at once: nothing in it can change, so one serves all.
DONE = DoneWork([])


def _first(backend: Any, *names: str) -> Any:
    """The method of another backend under the first of its names that this torch has."""
    for name in names[:-1]:
        method = getattr(backend, name, None)
        if method is not None:
            return method
    return getattr(backend, names[-1])


def _check_pairs(what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if len(outputs) != len(inputs) or not inputs:
        raise ValueError(f"{what}: needs as many outputs as inputs, at least one, got {len(outputs)} and {len(inputs)}")


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
