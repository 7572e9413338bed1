"""`DistributedOptimizer`: an optimizer that applies all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smddp.tensorflow import world
from smddp.tensorflow.accumulation import Accumulation
from smddp.tensorflow.reducing import BUCKET_CAP_MB, Compression, ReduceOp, all_reduce, reduction
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
    """The same optimizer, of Keras 2 or 3 or TensorFlow 1, with its state: the gradients it applies are all ranks'.

    bucket_cap_mb: MiB that gradients gather to before their all_reduce starts. backward_passes_per_step: passes whose
    gradients are added here before they are sent; average_aggregated_gradients divides their sum by the number.
    compression, sparse_as_dense, op: see `DistributedGradientTape`. name, use_locking: taken for the original's sake.
    What it saves is the plain optimizer's.

    Raises ValueError before `init`, for an optimizer that is wrapped already, and for arguments out of range; TypeError
    for what is no optimizer.
    """
    no_devices(device_dense, device_sparse)
    world.world()
    op = reduction(op)
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, not {bucket_cap_mb!r}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step!r}")
    if getattr(type(optimizer), "_smddp", False):
        raise ValueError("this optimizer is wrapped already: call DistributedOptimizer once")

    def reduced(gradients: Sequence[Any]) -> list[Any]:
        return all_reduce(gradients, op, compression, sparse_as_dense, bucket_cap_mb)

    passes = None
    if backward_passes_per_step > 1:
        passes = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    kind = type(optimizer)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if passes is not None:
            raise ValueError(
                "backward_passes_per_step is for Keras's optimizers: add gradients up before compute_gradients"
            )
        made = _of_graphs(kind, reduced)
    elif hasattr(kind, "apply") and hasattr(kind, "apply_gradients"):
        made = _of_keras_3(kind, reduced, passes)
    elif hasattr(kind, "apply_gradients"):
        made = _of_keras_2(kind, reduced, passes)
    else:
        raise TypeError(f"{kind.__name__} is no optimizer of Keras or TensorFlow 1")
    # Whatever is saved names the plain optimizer, and loads without this library.
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    made._smddp = True  # type: ignore[attr-defined]
    # In place: slots, step count and whoever tracks the optimizer's variables go on as they are.
    optimizer.__class__ = made
    return optimizer


Reduce = Callable[[Sequence[Any]], list[Any]]


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


def _of_graphs(kind: type, reduced: Reduce) -> type:
    class Distributed(kind):  # type: ignore[misc]
        def compute_gradients(self, *arguments: Any, **keywords: Any) -> Any:
            pairs = super().compute_gradients(*arguments, **keywords)
            gradients = reduced([gradient for gradient, _ in pairs])
            return list(zip(gradients, [variable for _, variable in pairs]))

    return Distributed
