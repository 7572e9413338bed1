"""Saves by process groups that hold a part of the model, or a copy: one directory for all, or one for each part."""

import itertools
import os
import re
import warnings

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls, save
from smp_cases.checkpoint import shared_directory
from smp_cases.expert_models import moe_config
from smp_cases.models import tiny
from smp_cases.parity import wrap2
from torch.distributed.checkpoint.state_dict import get_model_state_dict

#: (shard, tensor, expert) degrees, of four ranks.
DEGREES = ((1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (2, 2, 1), (2, 1, 4))
REMEDY = r"Save without process_group.*or name the directory tp\d_ep\d"


def _values():
    state = tsm.state
    model = tiny("mixtral") if state.ep_size > 1 else tiny()
    model = wrap2(tsm.transform(model, config=moe_config() if state.ep_size > 1 else None), False)
    return get_model_state_dict(model)


def _saved(call, values, directory, group):
    """Saves as ``call`` does. Returns this rank's error, and makes sure that no rank is left behind."""
    try:
        call({"model": values}, checkpoint_id=directory, process_group=group)
        maybe_finalize_async_calls(blocking=True)
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
    return None


def _loads(values, directory):
    """Loads each rank's part into zeros; returns True if all values are equal."""
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    load({"model": found}, checkpoint_id=directory)
    return all(torch.equal(found[name].to_local(), values[name].to_local()) for name in values)


def _parts(shard, tensor, expert):
    """Parts of the model that the shard groups hold."""
    return tensor * max(1, expert // shard)


def _check(name, group, call, values, degrees):
    """Saves into one directory, then into the directory of each part. FSDP's group leaves copies to the first one."""
    state, where = tsm.state, (degrees, name, call.__name__)
    first = state.rep_rank == 0
    with shared_directory() as directory:
        error = _saved(call, values, directory, group)
        if _parts(*degrees) == 1:
            assert error is None and _loads(values, directory), (where, error)
        elif first or name == "alone":
            assert error and re.search(REMEDY, error), (where, error)
            assert not os.listdir(directory), where
    with shared_directory() as directory:
        own = os.path.join(directory, f"tp{state.tp_rank}_ep{state.ep_rank}")
        error = _saved(call, values, own, group) if first or name != "alone" else dist.barrier()
        assert error is None and _loads(values, own), (where, error)


def case_groups_of_parts_save_apart_or_are_refused_before_they_write():
    for degrees in DEGREES:
        shard, tensor, expert = degrees
        tsm.init({"hybrid_shard_degree": shard, "tensor_parallel_degree": tensor, "expert_parallel_degree": expert})
        try:
            state, values = tsm.state, _values()
            groups = {"shard": state.shard_process_group, "alone": dist.new_subgroups(1)[0] if shard == 1 else None}
            groups["copies"] = state.replication_process_group if shard == 1 else None
            for (name, group), call in itertools.product(groups.items(), (save, async_save)):
                if group is not None and not (name == "alone" and _parts(*degrees) == 1):
                    _check(name, group, call, values, degrees)
        finally:
            tsm.state.reset()


def case_torchs_save_of_tensor_ranks_into_one_directory_is_refused():
    for shard in (1, 2):
        tsm.init({"hybrid_shard_degree": shard, "tensor_parallel_degree": 2})
        try:
            values, group = _values(), tsm.state.shard_process_group
            with shared_directory() as directory, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for place in (directory, os.path.join(directory, f"tp2-{tsm.state.tp_rank}")):
                    error = None
                    try:
                        dcp.save({"model": values}, storage_writer=dcp.FileSystemWriter(place), process_group=group)
                    except ValueError as raised:
                        error = str(raised)
                    dist.barrier()
                    writes = shard > 1 or tsm.state.rep_rank == 0
                    if place == directory and writes:
                        assert "would replace each other's files" in str(error), (shard, error)
                        assert not os.listdir(directory)
                    else:
                        assert error is None, error
        finally:
            tsm.state.reset()
