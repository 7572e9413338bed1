"""all_reduce of many tensors: reductions, compression, buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import Any

import tensorflow as tf

from smddp.tensorflow import ops, world

#: Maximum size of a gradient bucket in MiB.
BUCKET_CAP_MB = 25.0
#: Target number of buckets per step, each of at least 1 MiB: the first starts early, and the last, which no
#: computation overlaps, is small.
_BUCKETS = 8


class ReduceOp(Enum):
    """Reduction operation. The value is the core's number."""

    SUM = 0
    AVERAGE = 1
    MIN = 3
    MAX = 4


class NoneCompressor:
    """No compression."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor


class FP16Compressor:
    """Sends float32 and float64 as float16."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tensor if context is None else tf.cast(tensor, context)


class Compression:
    """Compression of gradients on the wire."""

    none = NoneCompressor
    fp16 = FP16Compressor


def reduction(op: Any) -> ReduceOp:
    """Returns a validated op. Raises ValueError for an invalid one."""
    if isinstance(op, ReduceOp):
        return op
    raise ValueError(f"op is {op!r}: give one of {', '.join(f'ReduceOp.{known.name}' for known in ReduceOp)}")


@tf.autograph.experimental.do_not_convert
def all_reduce(
    values: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> list[Any]:
    """Reduces `values` over all ranks, in buckets of one type from the last to the first, the order of a backward pass.

    None stays None. IndexedSlices keep their form, with the rows of all ranks, unless sparse_as_dense.

    Raises ValueError for an invalid op, and for IndexedSlices with MIN or MAX; InvalidArgumentError, before values are
    sent, if ranks disagree on which values are None.
    """
    op = reduction(op)
    found: list[Any] = list(values)
    for at, value in enumerate(found):
        if isinstance(value, tf.IndexedSlices) and sparse_as_dense:
            found[at] = tf.convert_to_tensor(value)
    # Ranks that disagree either make mismatched first calls, which the core reports, or all compare.
    alike = all(value is not None and not isinstance(value, tf.IndexedSlices) for value in found)
    with tf.control_dependencies([] if alike or len(found) < 2 else [_compared(found)]):
        _reduce(found, op, compression, bucket_cap_mb)
    return found


def _compared(values: Sequence[Any]) -> Any:
    """Compares over all ranks which values are None and which are sparse. Returns the check, for a graph."""
    form = "".join("0" if value is None else "s" if isinstance(value, tf.IndexedSlices) else "1" for value in values)
    number = int.from_bytes(hashlib.sha256(form.encode()).digest()[:7], "big")
    # Maximum of the number and of its negation: all ranks are equal if both match this rank's.
    own = tf.constant([number, -number], tf.int64)
    (most,) = ops.wait(ops.start([own], ReduceOp.MAX.value), [own])
    absent = [at for at, kind in enumerate(form) if kind == "0"]
    message = (
        f"ranks disagree on which of {len(values)} variables have a gradient: on rank {world.rank()} these have none, "
        f"by position: {absent[:20]}. Use the same variables on all ranks: add 0 * tf.reduce_sum(variable) to the loss"
    )
    return tf.debugging.Assert(tf.reduce_all(most == own), [message])


def _reduce(found: list[Any], op: ReduceOp, compression: Any, bucket_cap_mb: float) -> None:
    """Replaces each value by its reduction over all ranks."""
    sent: dict[int, tuple[tf.Tensor, Any]] = {
        at: compression.compress(tf.convert_to_tensor(value))
        for at, value in enumerate(found)
        if value is not None and not isinstance(value, tf.IndexedSlices)
    }
    under_way = []
    for bucket in buckets([(at, sent[at][0]) for at in reversed(sent)], int(bucket_cap_mb * 2**20)):
        tensors = [sent[at][0] for at in bucket]
        under_way.append((bucket, tensors, ops.start(tensors, op.value)))
    for bucket, tensors, ticket in under_way:
        for at, result in zip(bucket, ops.wait(ticket, tensors)):
            found[at] = compression.decompress(result, sent[at][1])
    for at in reversed(range(len(found))):
        if isinstance(found[at], tf.IndexedSlices):
            found[at] = _sparse(found[at], op, compression)


def buckets(tensors: Sequence[tuple[int, tf.Tensor]], cap: int) -> list[list[int]]:
    """Returns the buckets: adjacent tensors of one dtype, up to `cap` bytes, or fewer bytes if that gives few buckets.
    A tensor of unknown size has its own bucket.

    A bucket has the position of its last tensor, so it starts once that tensor is available.
    """
    whole = sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for _, tensor in tensors)
    cap = min(cap, max(2**20, whole // _BUCKETS))
    made: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for at, tensor in tensors:
        count = tensor.shape.num_elements()
        if count is None:
            made.append([at])
            continue
        members, size = open_.pop(tensor.dtype, ([], 0))
        more = count * tensor.dtype.size
        if members and size + more > cap:
            made.append(members)
            members, size = [], 0
        open_[tensor.dtype] = ([*members, at], size + more)
    return made + [members for members, _ in open_.values()]


def _sparse(value: tf.IndexedSlices, op: ReduceOp, compression: Any) -> tf.IndexedSlices:
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"{op} of IndexedSlices is not defined: give sparse_as_dense=True")
    rows, context = compression.compress(value.values)
    indices = ops.gather(value.indices)
    rows = compression.decompress(ops.gather(rows), context)
    if op is ReduceOp.AVERAGE:
        rows = rows / tf.cast(world.size(), rows.dtype)
    return tf.IndexedSlices(rows, indices, value.dense_shape)
