"""`DistributedOptimizer`: an optimizer that applies all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smddp.tensorflow import loss_scaling, world
from smddp.tensorflow.accumulation import Accumulation
from smddp.tensorflow.all_reduce import BUCKET_CAP_MB, Compression, ReduceOp, all_reduce, reduction
from smddp.tensorflow.tape import no_devices


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Returns the same optimizer, of Keras 2 or 3 or TensorFlow 1, with its state. It applies reduced gradients.

    A `LossScaleOptimizer` may be inside or outside, as `Model.compile` adds it under mixed_float16. All ranks skip a
    step together when the gradients of one rank overflow. A saved optimizer is the plain one.

    Args:
        optimizer: The optimizer.
        name: No effect.
        use_locking: No effect.
        device_dense: Must be empty: calls run on their tensors' devices.
        device_sparse: Must be empty, too.
        compression: As in `DistributedGradientTape`.
        sparse_as_dense: As in `DistributedGradientTape`.
        op: Reduction.
        bucket_cap_mb: Maximum MiB of gradients in one all_reduce.
        backward_passes_per_step: Number of passes whose gradients are summed before they are reduced.
            IndexedSlices are kept unless `sparse_as_dense`.
        average_aggregated_gradients: True divides these sums by that number.

    Raises:
        ValueError: `init` was not called, the optimizer is wrapped already, or an argument is out of range.
        TypeError: The object is not an optimizer.
    """
    no_devices(device_dense, device_sparse)
    world.world()
    op = reduction(op)
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, not {bucket_cap_mb!r}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step!r}")
    if _is_distributed(optimizer) or _is_distributed(loss_scaling.inner_optimizer(optimizer)):
        raise ValueError("this optimizer is wrapped already: call DistributedOptimizer once")

    def reduced(gradients: Sequence[Any]) -> list[Any]:
        return all_reduce(gradients, op, compression, sparse_as_dense, bucket_cap_mb)

    passes = None
    if backward_passes_per_step > 1:
        passes = Accumulation(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
    kind = type(optimizer)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if passes is not None:
            raise ValueError(
                "backward_passes_per_step is for Keras's optimizers: add gradients up before compute_gradients"
            )
        _become(optimizer, _of_graphs, reduced, None)
    elif hasattr(kind, "apply") and hasattr(kind, "apply_gradients"):
        loss_scaling.watch(kind, "apply", _is_distributed, _move)
        _become(optimizer, _of_keras_3, reduced, passes)
    elif hasattr(kind, "apply_gradients"):
        loss_scaling.watch(kind, "apply_gradients", _is_distributed, _move)
        _become(optimizer, _of_keras_2, reduced, passes)
    else:
        raise TypeError(f"unsupported optimizer {kind.__name__}: expected a Keras or TensorFlow 1 optimizer")
    return optimizer


Reduce = Callable[[Sequence[Any]], list[Any]]
Make = Callable[[type, Reduce, Accumulation | None], type]


def _become(optimizer: Any, make: Make, reduced: Reduce, passes: Accumulation | None) -> None:
    """Gives the optimizer the class that `make` derives from its own."""
    kind = type(optimizer)
    made = make(kind, reduced, passes)
    # A saved optimizer names the plain class, and loads without this library.
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    made._smddp = (kind, make, reduced, passes)  # type: ignore[attr-defined]
    # In place: slots, step count and references to the optimizer's variables remain valid.
    optimizer.__class__ = made


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(type(optimizer), "_smddp")


def _move(inner: Any, outer: Any) -> None:
    """Takes the reduction from `inner`, which becomes the plain optimizer again, and gives it to `outer`."""
    kind, *settings = type(inner)._smddp
    inner.__class__ = kind
    _become(outer, *settings)


def _of_keras_3(kind: type, reduced: Reduce, passes: Accumulation | None) -> type:
    class Distributed(kind):  # type: ignore[misc]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            apply = super().apply
            if passes is None:
                return apply(reduced(grads), trainable_variables)
            return passes.run(list(grads), lambda grads: apply(reduced(grads), trainable_variables))

    return Distributed


def _of_keras_2(kind: type, reduced: Reduce, passes: Accumulation | None) -> type:
    class Distributed(kind):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: Any, *more: Any, **keywords: Any) -> Any:
            pairs = list(grads_and_vars)
            apply, variables = super().apply_gradients, [variable for _, variable in pairs]

            def applied(gradients: Sequence[Any]) -> Any:
                return apply(list(zip(reduced(gradients), variables)), *more, **keywords)

            gradients = [gradient for gradient, _ in pairs]
            return applied(gradients) if passes is None else passes.run(gradients, applied)

    return Distributed


def _of_graphs(kind: type, reduced: Reduce, passes: Accumulation | None) -> type:
    class Distributed(kind):  # type: ignore[misc]
        def compute_gradients(self, *arguments: Any, **keywords: Any) -> Any:
            pairs = super().compute_gradients(*arguments, **keywords)
            gradients = reduced([gradient for gradient, _ in pairs])
            return list(zip(gradients, [variable for _, variable in pairs]))

    return Distributed
