"""Ranks, sizes and groups of this process for scripts: `smp.rank()`, `smp.pp_size()`, `smp.get_dp_process_group()`."""

from __future__ import annotations

import torch.distributed as dist

from smddp.modelparallel.state import state


def rank() -> int:
    """Return this process's rank among all."""
    return state.made("rank()")[1].rank


def size() -> int:
    """Return the number of processes."""
    return state.made("size()")[1].size


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return state.made("local_rank()")[1].local_rank


def local_size() -> int:
    """Return the number of processes on this machine."""
    return state.made("local_size()")[1].local_size


def pp_rank() -> int:
    """Return the stage that this process holds."""
    return state.made("pp_rank()")[1].pp_rank


def pp_size() -> int:
    """Return the number of stages."""
    return state.made("pp_size()")[1].pp_size


def tp_rank() -> int:
    """Return this process's rank in its tensor group."""
    return state.made("tp_rank()")[1].tp_rank


def tp_size() -> int:
    """Return the number of processes that share a layer."""
    return state.made("tp_size()")[1].tp_size


def rdp_rank() -> int:
    """Return the index of the copy of the parameters on this process."""
    return state.made("rdp_rank()")[1].rdp_rank


def rdp_size() -> int:
    """Return the number of copies of each parameter."""
    return state.made("rdp_size()")[1].rdp_size


def dp_rank() -> int:
    """Return this process's rank among the processes of its stage."""
    return state.made("dp_rank()")[1].dp_rank


def dp_size() -> int:
    """Return the number of processes of a stage."""
    return state.made("dp_size()")[1].dp_size


def mp_rank() -> int:
    """Return this process's rank in the group that holds one copy of the model."""
    return state.made("mp_rank()")[1].mp_rank


def mp_size() -> int:
    """Return the number of processes that hold one copy of the model."""
    return state.made("mp_size()")[1].mp_size


def get_world_process_group() -> dist.ProcessGroup:
    """Return the group of all processes."""
    state.made("get_world_process_group()")
    world = dist.group.WORLD
    assert world is not None  # `init` has made it
    return world


def get_pp_process_group() -> dist.ProcessGroup:
    """Return the group of this pipeline's stages."""
    return state.made("get_pp_process_group()")[1].pp_group


def get_tp_process_group() -> dist.ProcessGroup:
    """Return the group of the processes that share layers with this one."""
    return state.made("get_tp_process_group()")[1].tp_group


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return the group of the processes that hold the same parameters as this one."""
    return state.made("get_rdp_process_group()")[1].rdp_group


def get_dp_process_group() -> dist.ProcessGroup:
    """Return the group of the processes of this stage."""
    return state.made("get_dp_process_group()")[1].dp_group


def get_mp_process_group() -> dist.ProcessGroup:
    """Return the group of the processes that hold one copy of the model with this one."""
    return state.made("get_mp_process_group()")[1].mp_group


def get_pp_group() -> list[int]:
    """Return the ranks of `get_pp_process_group`."""
    return dist.get_process_group_ranks(get_pp_process_group())


def get_tp_group() -> list[int]:
    """Return the ranks of `get_tp_process_group`."""
    return dist.get_process_group_ranks(get_tp_process_group())


def get_rdp_group() -> list[int]:
    """Return the ranks of `get_rdp_process_group`."""
    return dist.get_process_group_ranks(get_rdp_process_group())


def get_dp_group() -> list[int]:
    """Return the ranks of `get_dp_process_group`."""
    return dist.get_process_group_ranks(get_dp_process_group())


def get_mp_group() -> list[int]:
    """Return the ranks of `get_mp_process_group`."""
    return dist.get_process_group_ranks(get_mp_process_group())
