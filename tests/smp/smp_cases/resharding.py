"""Sharded checkpoints of every kind of family load at other shard and tensor degrees, to the same values."""

import shutil
import tempfile

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import save
from smp_cases.models import tiny
from smp_cases.parity import full, wrap1, wrap2
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

TO = ({"hybrid_shard_degree": 4}, {"hybrid_shard_degree": 1, "tensor_parallel_degree": 4})


def _build(wrap, family: str, config: dict) -> torch.nn.Module:
    tsm.init(config)
    return wrap(tsm.transform(tiny(family)), False)


def _reshard(family: str, wrap, config: dict, to: tuple[dict, ...]) -> None:
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    try:
        model = _build(wrap, family, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        saved = full(model)
        save({"model": get_model_state_dict(model)}, checkpoint_id=where[0])
        for other in to:
            tsm.state.reset()
            model = _build(wrap, family, other)
            state = get_model_state_dict(model)
            load({"model": state}, checkpoint_id=where[0])
            set_model_state_dict(model, state)
            found = full(model)
            assert found.keys() == saved.keys(), found.keys() ^ saved.keys()
            for name, value in saved.items():
                assert torch.equal(found[name], value), (family, config, other, name)
    finally:
        tsm.state.reset()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where[0], ignore_errors=True)


def _both_ways(family: str, *engines) -> None:
    """From shards of both kinds under the first engine to others, and into shards of tensors alone under the last."""
    _reshard(family, engines[0], {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, TO)
    _reshard(family, engines[-1], {"hybrid_shard_degree": 4}, TO[1:])


def case_llama_reshards():
    _both_ways("llama", wrap1)
    _both_ways("llama", wrap2)


def case_fused_and_tied_weights_reshard():
    _both_ways("gpt2", wrap1, wrap2)


def case_stacked_experts_reshard():
    _both_ways("mixtral", wrap2, wrap1)


def case_tied_weights_reshard():
    _both_ways("gemma", wrap1, wrap2)


def case_a_weight_that_is_split_in_two_says_what_to_use():
    with refused("save_pretrained"):
        _reshard("falcon", wrap2, {"tensor_parallel_degree": 4}, TO[:1])
