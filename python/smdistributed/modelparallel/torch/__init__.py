"""SMP v1: `import smdistributed.modelparallel.torch as smp`. Guides: docs/guides/smp-v1."""

from smddp.modelparallel.activation import set_activation_checkpointing
from smddp.modelparallel.checkpointing.checkpoint import resume_from_checkpoint, save_checkpoint
from smddp.modelparallel.checkpointing.objects import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from smddp.modelparallel.checkpointing.part_files import load, save
from smddp.modelparallel.creation import delay_param_initialization, model_creation
from smddp.modelparallel.initialize import init, is_initialized
from smddp.modelparallel.model import DistributedModel
from smddp.modelparallel.optim.optimizer import DistributedOptimizer
from smddp.modelparallel.partitioning.explain import explain
from smddp.modelparallel.partitioning.partition import partition, set_partition
from smddp.modelparallel.places import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smddp.modelparallel.state import state
from smddp.modelparallel.step import StepOutput, is_tracing, step
from smddp.modelparallel.tensor.marks import set_tensor_parallelism, tensor_parallelism
from smddp.modelparallel.tensor.registry import tp_register, tp_register_with_module
from smdistributed.modelparallel.torch import amp, model, nn, optimizers, patches, state_mod, utils

reset = state.reset
WORLD, MP_GROUP, DP_GROUP, TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup
WORLD_RANK, MP_RANK, DP_RANK, TP_RANK, PP_RANK, RDP_RANK = RankType

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "explain",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "patches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "reset",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "size",
    "state",
    "state_mod",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "utils",
]
