"""all_to_all and barrier."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import AllToAllOptions, BarrierOptions, Work

from smddp.torch.arguments import block, check_apart, check_length, cut, describe, readable, split_counts, target_buffer
from smddp.torch.collectives.base import ALL_TO_ALL, BARRIER, DONE, UINT8, After, Base, Call, first_of
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import code_of
from smddp.torch.options import gather_options


class Exchanging(Base):
    """Collectives between all pairs of ranks."""

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
        fast = self._usable_fast_path()
        if fast is not None and (made := fast.all_to_all(output, input, output_split_sizes, input_split_sizes, opts)):
            return DONE if made is True else self._fast_path_handle(made, output)
        if not (input.is_cpu and self._serves_cpu) and not self._on_cuda(input):
            return first_of(self._elsewhere(input), "all_to_all_single", "alltoall_base")(
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
            # Uneven splits on one side make the call uneven.
            sends = sends or [input.numel() // self._size] * self._size
            receives = receives or [output.numel() // self._size] * self._size
            if sends[self._rank] != receives[self._rank]:
                raise ValueError(
                    f"{what}: this rank sends itself {sends[self._rank]} elements and expects "
                    f"{receives[self._rank]} from itself"
                )
        after: After = []
        buffer = target_buffer(output, after)
        source = readable(input)
        return self._start(
            Call(
                ALL_TO_ALL,
                code_of(input.dtype),
                input,
                block(source) if sends is None else cut(source, sends),
                block(buffer) if receives is None else cut(buffer, receives),
                (output, buffer, source),
                [output],
                after,
            ),
            opts,
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
        if not (input_tensors[0].is_cpu and self._serves_cpu) and not self._on_cuda(input_tensors[0]):
            return self._elsewhere(input_tensors[0]).alltoall(output_tensors, input_tensors, opts)
        self._check_all_here("all_to_all", input_tensors[0], (*input_tensors, *output_tensors))
        own_in, own_out = input_tensors[self._rank], output_tensors[self._rank]
        if own_in.numel() != own_out.numel():
            raise ValueError(
                f"all_to_all: this rank sends itself {describe(own_in)} and expects {describe(own_out)} from itself"
            )
        after: After = []
        buffers = [target_buffer(output, after) for output in output_tensors]
        if after:  # the core checks contiguous outputs
            check_apart("all_to_all", [(output_tensors, None)])
        sources = [readable(tensor) for tensor in input_tensors]
        return self._start(
            Call(
                ALL_TO_ALL,
                code_of(own_in.dtype),
                own_in,
                [block(source) for source in sources],
                [block(buffer) for buffer in buffers],
                (output_tensors, buffers, sources),
                list(output_tensors),
                after,
            ),
            opts,
        )

    @collective("barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if type(opts) is not BarrierOptions:
            opts = gather_options(BarrierOptions, opts, timeout)
        # The device whose backend runs the barrier.
        device = opts.device
        if self._others:
            other = self._others.get(device.type) if device is not None else None
            if other is not None:
                return other.barrier(opts)
        # As in torch: all work that this rank has enqueued completes before any rank leaves the barrier.
        self._settle(device, opts.device_ids)
        return self._start(Call(BARRIER, UINT8, None, None, None, None, []), opts)
