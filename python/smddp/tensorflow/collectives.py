"""Collectives on tensors and variables for scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from smddp.tensorflow import ops, world
from smddp.tensorflow.all_reduce import Compression, ReduceOp, all_reduce, reduction


@tf.autograph.experimental.do_not_convert
def allreduce(
    grad: Any = None,
    param_index: int | None = None,
    num_params: int | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    tensor: Any = None,
) -> Any:
    """Reduces a tensor or IndexedSlices over all ranks, in graphs and eagerly. Differentiable for SUM and AVERAGE.

    Args:
        grad: Tensor or IndexedSlices.
        param_index: Ignored; accepted for compatibility with the original library.
        num_params: Ignored, too.
        compression: `Compression.fp16` sends float16.
        op: Reduction.
        tensor: Other name of `grad`.

    Raises:
        ValueError: `init` was not called, `op` is unknown, or both or neither of `grad` and `tensor` are given.
    """
    if (grad is None) == (tensor is None):
        raise ValueError("allreduce: give one tensor")
    return _reduced(tensor if grad is None else grad, compression, op)


@tf.autograph.experimental.do_not_convert
def oob_allreduce(tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """Reduces values other than gradients, such as losses and metrics.

    Args:
        tensor: Tensor or IndexedSlices.
        compression: As in `allreduce`.
        op: Reduction.
    """
    return _reduced(tensor, compression, op)


def _reduced(value: Any, compression: Any, op: ReduceOp) -> Any:
    world.world()
    op = reduction(op)
    if isinstance(value, tf.IndexedSlices):
        return all_reduce([value], op, compression)[0]
    value = tf.convert_to_tensor(value)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or not (value.dtype.is_floating or value.dtype.is_complex):
        return all_reduce([value], op, compression)[0]

    @tf.custom_gradient
    def reduced(value: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            return all_reduce([upstream], op, compression)[0]

        return all_reduce([value], op, compression)[0], backward

    return reduced(value)


@tf.autograph.experimental.do_not_convert
def broadcast(tensor: Any, root_rank: int = 0) -> tf.Tensor:
    """Returns rank `root_rank`'s tensor on every rank. Differentiable: the root gets the sum of all ranks' gradients.

    Args:
        tensor: Input on the root; of the same shape and type on other ranks.
        root_rank: Rank of the input.

    Raises:
        ValueError: `init` was not called, or the root is invalid.
    """
    _root(root_rank)
    value = tf.convert_to_tensor(tensor)
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return ops.broadcast([value], root_rank)[0]

    @tf.custom_gradient
    def sent(value: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            total = all_reduce([upstream], ReduceOp.SUM)[0]
            return total if world.rank() == root_rank else tf.zeros_like(total)

        return ops.broadcast([value], root_rank)[0], backward

    return sent(value)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> Any:
    """Assigns rank `root_rank`'s values to TensorFlow or Keras variables.

    Args:
        variables: Variables in the same order on all ranks.
        root_rank: Rank of the values.

    Returns:
        The op in a TensorFlow 1 graph, else None.

    Raises:
        ValueError: `init` was not called, or the root is invalid.
    """
    _root(root_rank)
    # A Keras 3 variable wraps a TensorFlow variable.
    there = [getattr(variable, "value", variable) if _is_keras_3(variable) else variable for variable in variables]
    by_type: dict[Any, list[Any]] = {}
    for variable in there:
        by_type.setdefault(tf.as_dtype(variable.dtype).base_dtype, []).append(variable)
    assigned = []
    for group in by_type.values():
        values = ops.broadcast([tf.convert_to_tensor(variable) for variable in group], root_rank)
        assigned += [variable.assign(value) for variable, value in zip(group, values)]
    if tf.executing_eagerly() or tf.inside_function():
        return None
    return tf.group(*assigned)


@tf.autograph.experimental.do_not_convert
def broadcast_global_variables(root_rank: int = 0) -> Any:
    """Returns the op that assigns rank `root_rank`'s values to all global variables of a TensorFlow 1 graph.

    Args:
        root_rank: Rank of the values.

    Raises:
        RuntimeError: There is no TensorFlow 1 graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs of TensorFlow 1: "
            "call broadcast_variables(model.variables, root_rank) here"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts the initial values of rank `root_rank`, for `tf.compat.v1.train.MonitoredTrainingSession` and
    estimators."""

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._op: Any = None

    def begin(self) -> None:
        if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device or None):
                self._op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._op)


def overlap(tensor: Any) -> Any:
    """Returns the tensor unchanged: collectives overlap with the backward pass without hints."""
    return tensor


def _root(rank: int) -> None:
    size = world.size()
    if not 0 <= rank < size:
        raise ValueError(f"root_rank is {rank}: there are ranks 0 to {size - 1}")


def _is_keras_3(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable) and isinstance(getattr(variable, "value", None), tf.Variable)
