"""Full optimizer state dicts of both engines: every state of every parameter is that of one process."""

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.parity import wrap1, wrap2
from smp_cases.tensor_parallel import initialized
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


def _stepped(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.1)
    loss_of(model, ids).backward()
    optimizer.step()
    return optimizer


def _of_fsdp1(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return FSDP.optim_state_dict(model, optimizer)


def _of_both(model, optimizer):
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def case_every_state_is_that_of_one_process():
    plain = tiny()
    state = _stepped(plain, batch(0)).state
    wanted = {name: state[parameter] for name, parameter in plain.named_parameters()}
    for shard in (2, 4):
        for wrap, get in ((wrap1, _of_fsdp1), (wrap1, _of_both), (wrap2, _of_both)):
            with initialized(hybrid_shard_degree=shard):
                model = wrap(tsm.transform(tiny()), False)
                found = get(model, _stepped(model, part_of(batch(0), dist.get_rank(), 4)))["state"]
                for name, states in found.items():
                    for key in ("exp_avg", "exp_avg_sq"):
                        gap = (states[key] - wanted[name][key]).abs().max()
                        assert gap < 1e-6, (shard, get.__name__, name, key, float(gap))
