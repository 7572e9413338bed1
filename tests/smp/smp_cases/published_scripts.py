"""Training scripts as they were published for SMP v2, call for call: they train, save, and go on in other processes.

The calls are those of the scripts, with their groups, coordinators (global ranks) and folders; only the model, the
data and the paths are ours.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from smp_cases.checkpoint import AFTER, BEFORE, configured, shared_directory, train
from smp_cases.models import batch, loss_of, part_of, tiny
from torch.distributed import checkpoint
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.api import FullStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from torch.sagemaker.moe.moe_config import MoEConfig
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from torch.sagemaker.utils.process_group_utils import get_global_ranks


def _prepared(model=None, config=None):
    """Returns the objects that a script creates before training: model, optimizer, scheduler, and save function."""
    model = tsm.transform(tiny(num_key_value_heads=4) if model is None else model, config=config)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
        post_param_init_fn=None,
    )
    decays = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW([{"params": decays}, {"params": others}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    group = model.process_group
    first = min(get_global_ranks(group))
    is_action_rank = tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0
    return model, optimizer, scheduler, (group, first, is_action_rank)


def _folder(directory: str) -> str:
    degree = tsm.state.tensor_parallel_degree
    return os.path.join(directory, f"tp{degree}-{tsm.state.tp_rank}") if degree > 1 else directory


def _save_sharded(model, optimizer, scheduler, how, directory: str) -> None:
    group, coordinator_rank, is_action_rank = how
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        optim_state_dict = FSDP.optim_state_dict(model, optimizer)
        state_dict = {"model": model.state_dict(), "optimizer": optim_state_dict, "scheduler": scheduler.state_dict()}
    state_dict |= {"total_steps": BEFORE, "epoch": 1}
    if is_action_rank:
        checkpoint.save_state_dict(
            state_dict=state_dict,
            storage_writer=checkpoint.FileSystemWriter(_folder(directory)),
            planner=checkpoint.DefaultSavePlanner(),
            process_group=group,
            coordinator_rank=coordinator_rank,
        )
    dist.barrier()


def _load_sharded(model, optimizer, scheduler, how, directory: str) -> None:
    group, coordinator_rank, _ = how
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True),
    ):
        state_dict = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "epoch": 0, "total_steps": 0}
        checkpoint.load_state_dict(
            state_dict=state_dict,
            storage_reader=checkpoint.FileSystemReader(_folder(directory)),
            process_group=group,
            coordinator_rank=coordinator_rank,
            planner=checkpoint.DefaultLoadPlanner(),
        )
        model.load_state_dict(state_dict["model"])
        scheduler.load_state_dict(state_dict["scheduler"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state_dict["model"],
            optimizer_key="optimizer",
            storage_reader=checkpoint.FileSystemReader(_folder(directory)),
            process_group=model.process_group,
        )
        # In the order of the arguments of torch 2.0, for which the first of the scripts were written.
        flattened = FSDP.optim_state_dict_to_load(optim_state["optimizer"], model, optimizer)
        optimizer.load_state_dict(flattened)
    assert state_dict["total_steps"] == BEFORE and state_dict["epoch"] == 1


def save_sharded(directory: str, shard: int, tensor: int) -> None:
    """Run on pools of several sizes, like the next: trains the first half and saves."""
    with configured(shard, tensor), warnings.catch_warnings():
        model, optimizer, scheduler, how = _prepared()
        train(model, optimizer, range(BEFORE))
        _save_sharded(model, optimizer, scheduler, how, directory)


def resume_sharded(directory: str, shard: int, tensor: int) -> None:
    """Loads and trains the second half."""
    with configured(shard, tensor):
        model, optimizer, scheduler, how = _prepared()
        _load_sharded(model, optimizer, scheduler, how, directory)
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))


# ---- the later scripts: asynchronous, local and full ----


def _sub_folder(directory: str) -> str:
    return os.path.join(directory, f"tp{tsm.state.tp_rank}_ep{tsm.state.ep_rank}")


def _save_asynchronously(model, optimizer, scheduler, how, directory: str) -> None:
    group, coordinator_rank, is_action_rank = how
    maybe_finalize_async_calls(blocking=True, process_group=group)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "total_steps": BEFORE,
        }
    if is_action_rank:
        async_save(
            state_dict, checkpoint_id=_sub_folder(directory), process_group=group, coordinator_rank=coordinator_rank
        )
    maybe_finalize_async_calls(blocking=True, process_group=group)
    dist.barrier()


def _load_any_degree(model, optimizer, scheduler, how, directory: str) -> None:
    group, coordinator_rank, _ = how
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "total_steps": 0}
        load(
            state_dict,
            storage_reader=DistributedFileSystemReader(_sub_folder(directory)),
            process_group=group,
            coordinator_rank=coordinator_rank,
        )
        model.load_state_dict(state_dict["model"])
        scheduler.load_state_dict(state_dict["scheduler"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state_dict["model"],
            optimizer_key="optimizer",
            storage_reader=DistributedFileSystemReader(_sub_folder(directory)),
            process_group=group,
        )
        flattened = FSDP.optim_state_dict_to_load(
            model=model, optim=optimizer, optim_state_dict=optim_state["optimizer"]
        )
        optimizer.load_state_dict(flattened)
    assert state_dict["total_steps"] == BEFORE


def _local_place(model, directory: str):
    mine = None
    for ranks in tsm.state.ranker.get_rep_groups():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = (group, min(ranks))
    return f"{_sub_folder(directory)}_fsdp{model.rank}", *mine


def _save_local(model, optimizer, scheduler, how, directory: str) -> None:
    place, group, coordinator_rank = _local_place(model, directory)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": BEFORE}
    queue = AsyncCallsQueue()
    async_save(state_dict, checkpoint_id=place, process_group=group, coordinator_rank=coordinator_rank, queue=queue)
    queue.maybe_finalize_async_calls(blocking=True, process_group=group)
    dist.barrier()


def _load_local(model, optimizer, scheduler, how, directory: str) -> None:
    place, group, coordinator_rank = _local_place(model, directory)
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        init_optim_state(optimizer, skip_empty_param=True)
        state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "total_steps": 0}
        load(
            state_dict=state_dict,
            storage_reader=DistributedFileSystemReader(place),
            process_group=group,
            coordinator_rank=coordinator_rank,
        )
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])
    assert state_dict["total_steps"] == BEFORE


_KINDS = {
    "sharded": (_save_sharded, _load_sharded),
    "asynchronous": (_save_asynchronously, _load_any_degree),
    "local": (_save_local, _load_local),
}


def _resumes(kind: str, shard: int, tensor: int) -> None:
    save_it, load_it = _KINDS[kind]
    with shared_directory() as directory:
        with configured(shard, tensor):
            model, optimizer, *rest = _prepared()
            train(model, optimizer, range(BEFORE))
            save_it(model, optimizer, *rest, directory)
        with configured(shard, tensor):
            model, optimizer, *rest = _prepared()
            load_it(model, optimizer, *rest, directory)
            train(model, optimizer, range(BEFORE, BEFORE + AFTER))


def case_every_kind_resumes_by_the_calls_of_the_scripts():
    # At a shard degree of 1 FSDP's group holds copies, of which one saves; "sharded" at (2, 2) has its own test.
    for kind, *layout in (("sharded", 1, 2), ("asynchronous", 1, 2), ("local", 2, 2)):
        _resumes(kind, *layout)


def case_a_full_checkpoint_is_what_plain_transformers_loads():
    from transformers import AutoModelForCausalLM

    with shared_directory() as directory, configured(2, 2):
        model, optimizer, *_ = _prepared()
        train(model, optimizer, range(BEFORE))
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        ):
            state_dict = model.state_dict()
            if dist.get_rank() == 0:
                torch.save(state_dict, os.path.join(directory, "pytorch_model.bin"))
                model.config.save_pretrained(directory)
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(directory)
        ids = batch(9)
        assert abs(float(loss_of(plain, ids).detach()) - float(loss_of(model, ids).detach())) < 1e-5


def case_experts_resume_by_the_calls_of_the_scripts():
    for kind, tensor in (("sharded", 1), ("asynchronous", 2)):
        with shared_directory() as directory:
            unbroken = _train_experts(kind, tensor, directory, resumes=False)
            resumed = _train_experts(kind, tensor, directory, resumes=True)
            gap = max(abs(a - b) for a, b in zip(unbroken[BEFORE:], resumed))
            assert gap < 1e-6, (kind, tensor, unbroken, resumed)


def _train_experts(kind: str, tensor: int, directory: str, resumes: bool) -> list[float]:
    from smp_cases.expert_models import tiny_moe

    save_it, load_it = _KINDS[kind]
    tsm.init({"hybrid_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": tensor})
    try:
        config = MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)
        model, optimizer, *rest = _prepared(tiny_moe("mixtral"), config)
        if resumes:
            load_it(model, optimizer, *rest, directory)
        losses = []
        for step in range(BEFORE if resumes else 0, BEFORE + AFTER):
            optimizer.zero_grad()
            loss = loss_of(model, part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if not resumes and step == BEFORE - 1:
                save_it(model, optimizer, *rest, directory)
        return losses
    finally:
        tsm.state.reset()
