"""broadcast, gather, scatter: from one rank to all, or from all to one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions, ScatterOptions, Work

from smddp.torch.arguments import block, check_apart, check_length, describe, one, readable, target_buffer
from smddp.torch.collectives.base import BROADCAST, DONE, GATHER, SCATTER, After, Base, Call, first_of
from smddp.torch.dispatch import collective
from smddp.torch.dtypes import code_of
from smddp.torch.options import gather_options


class Rooted(Base):
    """Collectives that send blocks from or to one rank."""

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
        fast = self._usable_fast_path()
        if fast is not None and (made := fast.broadcast(tensors, opts)):
            return DONE if made is True else self._fast_path_handle(made, tensors[0])
        tensor = one(tensors, "broadcast")
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).broadcast(tensors, opts)
        self._check_strided(tensor)
        root = opts.rootRank
        self._check_root("broadcast", root)
        after: After = []
        if root == self._rank:
            buffer = readable(tensor)
            source = target = block(buffer)
        else:
            buffer = target_buffer(tensor, after)
            source, target = None, block(buffer)
        return self._start(
            Call(
                BROADCAST, code_of(tensor.dtype), tensor, source, target, (tensor, buffer), [tensor], after, root=root
            ),
            opts,
        )

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
        if not (tensor.is_cpu and self._serves_cpu) and not self._on_cuda(tensor):
            return self._elsewhere(tensor).gather(output_tensors, input_tensors, opts)
        self._check_strided(tensor)
        root = opts.rootRank
        self._check_root("gather", root)
        after: After = []
        outputs: Sequence[Tensor] = []
        target: Any = None
        buffers: list[Tensor] = []
        if root == self._rank:
            outputs = one(output_tensors, "gather: output lists at the root")
            check_length("gather: the output list", outputs, self._size)
            self._check_all_here("gather", tensor, outputs)
            if outputs[root].numel() != tensor.numel():
                raise ValueError(
                    f"gather: entry {root} of the output list, {describe(outputs[root])}, must have as many elements "
                    f"as the root's input, {describe(tensor)}"
                )
            buffers = [target_buffer(output, after) for output in outputs]
            if after:  # the core checks contiguous outputs
                check_apart("gather", [(outputs, None)])
            target = [block(buffer) for buffer in buffers]
        elif any(len(outputs) for outputs in output_tensors):
            raise ValueError(f"gather: only the root (rank {root}) has outputs, this is rank {self._rank}")
        source = readable(tensor)
        return self._start(
            Call(
                GATHER,
                code_of(tensor.dtype),
                tensor,
                block(source),
                target,
                (outputs, buffers, source),
                list(outputs),
                after,
                root=root,
            ),
            opts,
        )

    @collective("gather_single")
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = gather_options(GatherOptions, opts)
        if not (input.is_cpu and self._serves_cpu) and not self._on_cuda(input):
            return first_of(self._elsewhere(input), "gather_single", "gather_into_tensor")(output, input, opts)
        self._check_strided(input)
        root = opts.rootRank
        self._check_root("gather_into_tensor", root)
        after: After = []
        buffer, target = output, None
        if root == self._rank:
            self._check_all_here("gather_into_tensor", input, (output,))
            if output.numel() != input.numel() * self._size:
                raise ValueError(
                    f"gather_into_tensor: output {describe(output)} must have {self._size} times the elements of input "
                    f"{describe(input)}"
                )
            buffer = target_buffer(output, after)
            target = block(buffer)
        source = readable(input)
        return self._start(
            Call(
                GATHER,
                code_of(input.dtype),
                input,
                block(source),
                target,
                (output, buffer, source),
                [output],
                after,
                root=root,
            ),
            opts,
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
        if not (output.is_cpu and self._serves_cpu) and not self._on_cuda(output):
            return self._elsewhere(output).scatter(output_tensors, input_tensors, opts)
        self._check_strided(output)
        root = opts.rootRank
        self._check_root("scatter", root)
        sources: list[Tensor] = []
        source: Any = None
        if root == self._rank:
            inputs = one(input_tensors, "scatter: input lists at the root")
            check_length("scatter: the input list", inputs, self._size)
            self._check_all_here("scatter", output, inputs)
            if inputs[root].numel() != output.numel():
                raise ValueError(
                    f"scatter: entry {root} of the input list, {describe(inputs[root])}, must have as many elements "
                    f"as the root's output, {describe(output)}"
                )
            sources = [readable(tensor) for tensor in inputs]
            source = [block(tensor) for tensor in sources]
        elif any(len(inputs) for inputs in input_tensors):
            raise ValueError(f"scatter: only the root (rank {root}) has inputs, this is rank {self._rank}")
        after: After = []
        buffer = target_buffer(output, after)
        return self._start(
            Call(
                SCATTER,
                code_of(output.dtype),
                output,
                source,
                block(buffer),
                (output, buffer, sources),
                [output],
                after,
                root=root,
            ),
            opts,
        )
