"""all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceCoalescedOptions, AllreduceOptions, ReduceOptions, ReduceScatterOptions, Work

from smddp.torch.arguments import (
    block,
    check_apart,
    check_length,
    check_memory,
    check_writable,
    describe,
    one,
    readable,
    target_buffer,
)
from smddp.torch.collectives.base import ALL_REDUCE, DONE, REDUCE, REDUCE_SCATTER, After, Call, check_pairs, first_of
from smddp.torch.collectives.sparse import SparseAllReduce
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import code_of, reduction
from smddp.torch.options import gather_options


class Reducing(SparseAllReduce):
    """Collectives that reduce the data of all ranks."""

    @collective("all_reduce")
    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if type(opts) is not AllreduceOptions:
            opts = gather_options(AllreduceOptions, opts, op, timeout)
        fast = self._usable_fast_path()
        if fast is not None and (made := fast.all_reduce(tensors, opts)):
            return DONE if made is True else self._fast_path_handle(made, tensors[0])
        tensor = one(tensors, "all_reduce")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).allreduce(tensors, opts)
        if tensor.layout != torch.strided:  # on a CPU
            return self._allreduce_sparse(tensor, opts)
        return self._allreduce(tensor, opts)

    def _allreduce(self, tensor: Tensor, opts: Any) -> Work:
        code = code_of(tensor.dtype)
        redop = reduction(opts.reduceOp, tensor.dtype, code)
        after: After = []
        buffer = target_buffer(tensor, after, keep_values=True)
        place = block(buffer)
        return self._start(
            Call(ALL_REDUCE, code, tensor, place, place, (tensor, buffer), [tensor], after, redop=redop), opts
        )

    @collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        if type(opts) is not AllreduceCoalescedOptions:
            opts = gather_options(AllreduceCoalescedOptions, opts)
        if not tensors:
            raise ValueError("all_reduce_coalesced: needs at least one tensor")
        if not (tensors[0].is_cpu and self._serves_cpu) and not self._on_cuda(tensors[0]):
            return self._elsewhere(tensors[0]).allreduce_coalesced(tensors, opts)
        for tensor in tensors:
            self._check_all_here("all_reduce_coalesced", tensors[0], (tensor,))
            check_memory(tensor)
            check_writable(tensor)
        check_apart("all_reduce_coalesced", [((tensor,), None) for tensor in tensors])
        return self._start_parts((self._allreduce(tensor, opts) for tensor in tensors), list(tensors), opts)

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
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).reduce(tensors, opts)
        self._check_strided(tensor)
        root = opts.rootRank
        self._check_root("reduce", root)
        code = code_of(tensor.dtype)
        redop = reduction(opts.reduceOp, tensor.dtype, code)
        after: After = []
        if root == self._rank:
            buffer = target_buffer(tensor, after, keep_values=True)
            source = target = block(buffer)
        else:
            buffer = readable(tensor)
            source, target = block(buffer), None
        return self._start(
            Call(REDUCE, code, tensor, source, target, (tensor, buffer), [tensor], after, redop=redop, root=root), opts
        )

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
        if not (output.is_cpu and self._serves_cpu) and not self._on_cuda(output):
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
        buffer = target_buffer(output, after)
        sources = [readable(tensor) for tensor in inputs]
        return self._start(
            Call(
                REDUCE_SCATTER,
                code,
                output,
                [block(source) for source in sources],
                block(buffer),
                (output, buffer, sources),
                [output],
                after,
                redop=redop,
            ),
            opts,
        )

    @collective("reduce_scatter_single")
    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        if type(opts) is not ReduceScatterOptions:
            opts = gather_options(ReduceScatterOptions, opts)
        fast = self._usable_fast_path()
        if fast is not None and (made := fast.reduce_scatter(outputTensor, inputTensor, opts)):
            return DONE if made is True else self._fast_path_handle(made, outputTensor)
        if not (inputTensor.is_cpu and self._serves_cpu) and not self._on_cuda(inputTensor):
            other = self._elsewhere(inputTensor)
            return first_of(other, "reduce_scatter_single", "_reduce_scatter_base")(outputTensor, inputTensor, opts)
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
        buffer = target_buffer(output, after)
        source = readable(input)
        return self._start(
            Call(
                REDUCE_SCATTER,
                code,
                output,
                block(source),
                block(buffer),
                (output, buffer, source),
                [output],
                after,
                redop=redop,
            ),
            opts,
        )

    @collective("reduce_scatter_single_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputTensors: Sequence[Tensor], inputTensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = gather_options(ReduceScatterOptions, opts)
        what = "reduce_scatter_tensor_coalesced"
        check_pairs(what, outputTensors, inputTensors)
        if not (inputTensors[0].is_cpu and self._serves_cpu) and not self._on_cuda(inputTensors[0]):
            other = self._elsewhere(inputTensors[0])
            return first_of(other, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")(
                outputTensors, inputTensors, opts
            )
        for output, tensor in zip(outputTensors, inputTensors, strict=True):
            self._check_all_here(what, output, (tensor,))
            check_memory(tensor, output)
            check_writable(output)
            reduction(opts.reduceOp, output.dtype, code_of(output.dtype))
            if tensor.numel() != output.numel() * self._size:
                raise ValueError(
                    f"{what}: input {describe(tensor)} must have {self._size} times the elements of output "
                    f"{describe(output)}"
                )
        check_apart(what, [((output,), tensor) for output, tensor in zip(outputTensors, inputTensors, strict=True)])
        works = (
            self._reduce_scatter_single(what, output, tensor, opts)
            for output, tensor in zip(outputTensors, inputTensors, strict=True)
        )
        return self._start_parts(works, list(outputTensors), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
