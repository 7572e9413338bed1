"""Data parallel training with TensorFlow, under its historic name: docs/guides/tensorflow.md."""

from smddp import __version__
from smddp.tensorflow.all_reduce import Compression, ReduceOp
from smddp.tensorflow.collectives import (
    BroadcastGlobalVariablesHook,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    oob_allreduce,
    overlap,
)
from smddp.tensorflow.optimizer import DistributedOptimizer
from smddp.tensorflow.tape import DistributedGradientTape
from smddp.tensorflow.world import (
    get_worker_comm,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from smdistributed.dataparallel.tensorflow import keras
from smdistributed.dataparallel.tensorflow.keras import callbacks

# Horovod's names of the same, for its scripts.
Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ReduceOp",
    "Sum",
    "__version__",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "get_worker_comm",
    "init",
    "is_initialized",
    "keras",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]
