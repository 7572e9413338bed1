"""All forms of all_gather."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work

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
from smddp.torch.collectives.base import ALL_GATHER, DONE, After, Base, Call, check_pairs, first_of
from smddp.torch.compat import c10d
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import code_of
from smddp.torch.options import gather_options


class Gathering(Base):
    """Collectives that gather the data of all ranks on every rank."""

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
        if type(opts) is not c10d.AllgatherOptions:
            opts = gather_options(c10d.AllgatherOptions, opts, timeout)
        tensor = one(input_tensors, "all_gather")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
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
        buffers = [target_buffer(output, after) for output in outputs]
        if after:  # the core checks contiguous outputs
            check_apart(what, [(outputs, None)])
        source = readable(tensor)
        return self._start(
            Call(
                ALL_GATHER,
                code_of(tensor.dtype),
                tensor,
                block(source),
                [block(buffer) for buffer in buffers],
                (outputs, buffers, source),
                list(outputs),
                after,
            ),
            opts,
        )

    @collective("all_gather_single")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        if type(opts) is not c10d.AllgatherOptions:
            opts = gather_options(c10d.AllgatherOptions, opts)
        fast = self._usable_fast_path()
        if fast is not None and (made := fast.all_gather(output, input, opts)):
            return DONE if made is True else self._fast_path_handle(made, output)
        if not (input.is_cpu and self._serves_cpu) and not self._on_cuda(input):
            return first_of(self._elsewhere(input), "all_gather_single", "_allgather_base")(output, input, opts)
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
        buffer = target_buffer(output, after)
        source = readable(input)
        return self._start(
            Call(
                ALL_GATHER,
                code_of(input.dtype),
                input,
                block(source),
                block(buffer),
                (output, buffer, source),
                [output],
                after,
            ),
            opts,
        )

    @collective("all_gather_coalesced")
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """output_lists[r][k] receives input_list[k] of rank r."""
        opts = gather_options(c10d.AllgatherOptions, opts)
        if not input_list:
            raise ValueError("all_gather_coalesced: needs at least one tensor")
        if not (input_list[0].is_cpu and self._serves_cpu) and not self._on_cuda(input_list[0]):
            return self._elsewhere(input_list[0]).allgather_coalesced(output_lists, input_list, opts)
        check_length("all_gather_coalesced: the output lists", output_lists, self._size)
        for rank, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                raise ValueError(
                    f"all_gather_coalesced: output list {rank} has {len(outputs)} tensors, the input list has "
                    f"{len(input_list)}"
                )
        # All parts are checked before the first one starts.
        for index, tensor in enumerate(input_list):
            outputs = [of_rank[index] for of_rank in output_lists]
            self._check_all_here("all_gather_coalesced", tensor, outputs)
            check_memory(tensor, *outputs)
            for output in outputs:
                check_writable(output)
                if output.numel() != tensor.numel():
                    raise ValueError(
                        f"all_gather_coalesced: output {describe(output)} does not fit input {describe(tensor)}"
                    )
        check_apart(
            "all_gather_coalesced",
            [([of_rank[index] for of_rank in output_lists], tensor) for index, tensor in enumerate(input_list)],
        )
        works = (
            self._allgather("all_gather_coalesced", [of_rank[index] for of_rank in output_lists], tensor, opts)
            for index, tensor in enumerate(input_list)
        )
        return self._start_parts(works, [output for outputs in output_lists for output in outputs], opts)

    @collective("all_gather_single_coalesced")
    def all_gather_single_coalesced(
        self, output_lists: Sequence[Tensor], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = gather_options(c10d.AllgatherOptions, opts)
        what = "all_gather_into_tensor_coalesced"
        check_pairs(what, output_lists, input_list)
        if not (input_list[0].is_cpu and self._serves_cpu) and not self._on_cuda(input_list[0]):
            other = self._elsewhere(input_list[0])
            return first_of(other, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")(
                output_lists, input_list, opts
            )
        for output, tensor in zip(output_lists, input_list, strict=True):
            self._check_all_here(what, tensor, (output,))
            check_memory(tensor, output)
            check_writable(output)
            if output.numel() != tensor.numel() * self._size:
                raise ValueError(
                    f"{what}: output {describe(output)} must have {self._size} times the elements of input "
                    f"{describe(tensor)}"
                )
        check_apart(what, [((output,), tensor) for output, tensor in zip(output_lists, input_list, strict=True)])
        works = (
            self._all_gather_single(what, output, tensor, opts)
            for output, tensor in zip(output_lists, input_list, strict=True)
        )
        return self._start_parts(works, list(output_lists), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
