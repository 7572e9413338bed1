"""Gradients of several backward passes, added up before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Accumulation:
    """Sums on this rank; every so many passes they are handed on and begin anew."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._sums: list[Any] = []
        self._count: Any = None

    def run(self, gradients: Sequence[Any], hand_on: Callable[[list[Any]], Any]) -> Any:
        """Adds a pass's gradients; in the last one `hand_on` gets the sums, None where a gradient is None."""
        if self._count is None:
            # Once, outside of whatever function is being traced.
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
                self._sums = [
                    None if gradient is None else tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
                    for gradient in gradients
                ]
        added = []
        for total, gradient in zip(self._sums, gradients):
            if total is not None:
                added.append(total.assign_add(tf.convert_to_tensor(gradient)))
        with tf.control_dependencies(added):
            count = self._count.assign_add(1)

        def last() -> tf.Tensor:
            scale = self._passes if self._average else 1
            hand_on([None if total is None else total.read_value() / scale for total in self._sums])
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return tf.constant(True)

        return tf.cond(count % self._passes == 0, last, lambda: tf.constant(False))
