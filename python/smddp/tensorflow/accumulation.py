"""Local gradient accumulation over several backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Accumulation:
    """Sums of this rank's gradients; every `passes` backward passes it passes them on and starts again from zero.

    average: divide the sums by `passes`. sparse_as_dense: sum IndexedSlices as dense tensors. Otherwise the rows and
    indices of all passes are kept, as one backward pass over the joined batch returns them.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes, self._average, self._sparse_as_dense = passes, average, sparse_as_dense
        self._sums: dict[int, _Dense | _Sparse] = {}
        self._count: Any = None
        self._traced = False
        # Positions without a gradient when a graph was traced: that graph never passes them on.
        self._absent_in_a_graph: set[int] = set()

    def run(self, gradients: Sequence[Any], apply: Callable[[list[Any]], Any]) -> Any:
        """Adds one pass. The last of `passes` calls `apply` with the sums, and None where none of them had a gradient.

        Raises ValueError in a tf.function where a variable has a gradient that it lacked when another function or
        signature was traced; InvalidArgumentError where some variables without a gradient in this function had one in
        an earlier pass, and others had none.
        """
        if self._count is None:
            # Variables are created outside the function that is being traced.
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
        present = {at for at, gradient in enumerate(gradients) if gradient is not None}
        added = [self._sum(at, gradients[at]).add(gradients[at]) for at in present]
        if not tf.executing_eagerly():
            self._traced = True
            self._absent_in_a_graph.update(set(range(len(gradients))) - self._sums.keys())
        with tf.control_dependencies([op for ops in added for op in ops]):
            count = self._count.assign_add(1)

        def applied(found: set[int]) -> tf.Tensor:
            scale = self._passes if self._average else 1
            apply([self._sums[at].read(scale) if at in found else None for at in range(len(gradients))])
            for total in self._sums.values():
                total.clear()
            return tf.constant(True)

        def last() -> tf.Tensor:
            # A sum without a gradient in this pass may have one of an earlier pass, or be zero since the last step.
            earlier = sorted(self._sums.keys() - present)
            if tf.executing_eagerly():
                done = applied(present.union(at for at in earlier if self._sums[at].used))
                if not self._traced:
                    self._sums.clear()
                return done
            if not earlier:
                return applied(present)
            used = tf.stack([self._sums[at].used for at in earlier])
            return tf.cond(
                tf.reduce_any(used), lambda: self._all_of(used, earlier, present, applied), lambda: applied(present)
            )

        return tf.cond(count % self._passes == 0, last, lambda: tf.constant(False))

    def _all_of(self, used: Any, earlier: list[int], present: set[int], applied: Callable[[set[int]], Any]) -> Any:
        """Applies sums of a graph's earlier passes. A graph cannot leave out a part of them: this is an error."""
        message = (
            f"backward_passes_per_step={self._passes}: of variables {earlier}, which lack a gradient in the last pass, "
            "a part had one in earlier passes: use them together, or leave the step outside tf.function"
        )
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(used), [message, used])]):
            return applied(present.union(earlier))

    def _sum(self, at: int, gradient: Any) -> _Dense | _Sparse:
        if at not in self._sums:
            if at in self._absent_in_a_graph:
                raise ValueError(
                    f"backward_passes_per_step={self._passes}: variable {at} has a gradient in this pass, and had none "
                    "when an earlier tf.function was traced, so its sum would be lost: use every variable in every "
                    "pass (add 0 * tf.reduce_sum(variable) to the loss), or leave the step outside tf.function"
                )
            sparse = isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense
            with tf.init_scope():
                self._sums[at] = _Sparse(gradient) if sparse else _Dense(gradient)
        elif isinstance(self._sums[at], _Sparse) and not (
            isinstance(gradient, tf.IndexedSlices) or self._traced or not tf.executing_eagerly()
        ):
            # As in one backward pass over the joined batch, in whichever order the passes come.
            rows = self._sums[at].read(1)
            self._sums[at] = _Dense(gradient)
            self._sums[at].add(rows)
        return self._sums[at]


class _Dense:
    """The sum of dense gradients."""

    def __init__(self, gradient: Any) -> None:
        self.used = tf.Variable(False, trainable=False)
        self._total = tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)

    def add(self, gradient: Any) -> list[Any]:
        return [self._total.assign_add(tf.convert_to_tensor(gradient)), self.used.assign(True)]

    def read(self, scale: int) -> Any:
        return self._total.read_value() / scale

    def clear(self) -> None:
        self._total.assign(tf.zeros_like(self._total))
        self.used.assign(False)


class _Sparse:
    """The rows and indices of IndexedSlices, one after the other. Repeated indices remain, as in one gradient."""

    def __init__(self, gradient: tf.IndexedSlices) -> None:
        self.used = tf.Variable(False, trainable=False)
        self._shape = gradient.shape
        row = self._shape[1:]
        self._rows = tf.Variable(tf.zeros([0, *row], gradient.dtype), shape=[None, *row], trainable=False)
        indices = tf.zeros([0], gradient.indices.dtype)
        self._indices = tf.Variable(indices, shape=[None], trainable=False)

    def add(self, gradient: Any) -> list[Any]:
        if isinstance(gradient, tf.IndexedSlices):
            rows, indices = gradient.values, gradient.indices
        else:
            rows, indices = gradient, tf.range(self._shape[0], dtype=self._indices.dtype)
        rows = tf.concat([self._rows.read_value(), rows], 0)
        indices = tf.concat([self._indices.read_value(), tf.cast(indices, self._indices.dtype)], 0)
        return [self._rows.assign(rows), self._indices.assign(indices), self.used.assign(True)]

    def read(self, scale: int) -> tf.IndexedSlices:
        shape = tf.constant(self._shape.as_list(), self._indices.dtype)
        return tf.IndexedSlices(self._rows.read_value() / scale, self._indices.read_value(), shape)

    def clear(self) -> None:
        self._rows.assign(self._rows.read_value()[:0])
        self._indices.assign(self._indices.read_value()[:0])
        self.used.assign(False)
