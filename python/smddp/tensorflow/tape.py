"""`DistributedGradientTape`: a tape that reduces gradients over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smddp.tensorflow import world
from smddp.tensorflow.all_reduce import Compression, ReduceOp, all_reduce, reduction


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> tf.GradientTape:
    """Returns the same tape, whose `gradient` is reduced over all ranks. Call it before, during or after recording.

    Args:
        gradtape: A `tf.GradientTape`.
        device_dense: Must be empty: calls run on their tensors' devices.
        device_sparse: Must be empty, too.
        compression: `Compression.fp16` sends float16.
        sparse_as_dense: Gradients of embeddings become dense. Otherwise they are IndexedSlices with the rows of
            all ranks.
        op: Reduction.

    Raises:
        ValueError: `init` was not called, a device is given, or `op` is invalid.
    """
    no_devices(device_dense, device_sparse)
    op = reduction(op)
    world.world()
    kind = type(gradtape)

    class Distributed(kind):  # type: ignore[misc, valid-type]
        def gradient(self, target: Any, sources: Any, *more: Any, **keywords: Any) -> Any:
            gradients = super().gradient(target, sources, *more, **keywords)
            flat = tf.nest.flatten(gradients)
            return tf.nest.pack_sequence_as(gradients, all_reduce(flat, op, compression, sparse_as_dense))

    Distributed.__name__ = Distributed.__qualname__ = "DistributedGradientTape"
    made = Distributed.__new__(Distributed)
    # Both are one tape.
    made.__dict__ = gradtape.__dict__
    return made


def no_devices(dense: str, sparse: str) -> None:
    if dense or sparse:
        raise ValueError(
            f"device_dense and device_sparse are not supported ({dense!r}, {sparse!r}): leave them out, "
            "collectives are placed with their tensors"
        )
