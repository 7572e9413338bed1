"""The same for scripts that train with Keras."""

from smddp import __version__
from smddp.tensorflow.all_reduce import Compression, ReduceOp
from smddp.tensorflow.collectives import (
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    oob_allreduce,
)
from smddp.tensorflow.optimizer import DistributedOptimizer
from smddp.tensorflow.world import init, is_initialized, local_rank, local_size, rank, shutdown, size
from smdistributed.dataparallel.tensorflow.keras import callbacks

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ReduceOp",
    "__version__",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "rank",
    "shutdown",
    "size",
]
