"""The core's ops in TensorFlow graphs and eager mode, in the same order on all ranks.

A collective is two ops: `start` submits the tensors and returns, and `wait` completes it; ops between them overlap.
Each op depends on the previous op of its graph, because ranks that ran independent ops in different orders would make
mismatched calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library

#: Latest op of each graph and its control flow context.
_newest: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def start(tensors: Sequence[tf.Tensor], op: int) -> tf.Tensor:
    """Start the all_reduce of tensors of one type; op: the core's number of a reduction. Returns a ticket, int64."""
    return _made("SmddpStart", 1, {"tensors": list(tensors)}, {"N": len(tensors), "T": tensors[0].dtype, "op": op})[0]


def wait(ticket: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results of a started operation. like: tensors with the results' dtypes and shapes."""
    attributes = {"N": len(like), "T": like[0].dtype}
    return _shaped(_made("SmddpWait", len(like), {"ticket": ticket}, attributes), like)


def broadcast(tensors: Sequence[tf.Tensor], root: int) -> list[tf.Tensor]:
    """Returns rank `root`'s tensors, which have one dtype."""
    attributes = {"N": len(tensors), "T": tensors[0].dtype, "root": root}
    return _shaped(_made("SmddpBroadcast", len(tensors), {"tensors": list(tensors)}, attributes), tensors)


def gather(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all ranks in rank order. The number of rows may differ between ranks."""
    (result,) = _made("SmddpGather", 1, {"tensor": tensor}, {"T": tensor.dtype})
    if not tf.executing_eagerly() and tensor.shape.rank is not None:
        result.set_shape([None, *tensor.shape[1:]])
    return result


def _shaped(results: list[tf.Tensor], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if not tf.executing_eagerly():
        for result, tensor in zip(results, like):
            result.set_shape(tensor.shape)
    return results


def _made(name: str, outputs: int, inputs: dict[str, Any], attributes: dict[str, Any]) -> list[tf.Tensor]:
    if tf.executing_eagerly():
        given = [tensor for value in inputs.values() for tensor in (value if isinstance(value, list) else [value])]
        values = {
            key: value.as_datatype_enum if isinstance(value, tf.DType) else value for key, value in attributes.items()
        }
        pairs = tuple(word for pair in values.items() for word in pair)
        return list(execute.execute(name.encode(), outputs, inputs=given, attrs=pairs, ctx=context.context()))
    graph = tf.compat.v1.get_default_graph()
    flow = graph._get_control_flow_context()
    before, its_flow = _newest.get(graph, (None, None))
    if before is not None:
        before = before()
    # A control edge must not cross into another loop or branch of TensorFlow 1.
    edges = [before] if before is not None and its_flow is flow else []
    # TensorFlow infers these attributes from the inputs and rejects explicit values.
    named = {key: value for key, value in attributes.items() if key not in _inferred(inputs)}
    with tf.control_dependencies(edges):
        _, _, made, found = op_def_library._apply_op_helper(name, **inputs, **named)
    _newest[graph] = (weakref.ref(made), flow)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _inferred(inputs: dict[str, Any]) -> tuple[str, ...]:
    if "tensors" in inputs:
        return ("N", "T")
    return ("T",) if "tensor" in inputs else ()
