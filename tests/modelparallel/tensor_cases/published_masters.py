"""Checkpoints of scripts that keep float32 copies themselves: by name, whole and per replica."""

from __future__ import annotations

import copy

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases import pipelines
from front_cases.by_hand import job
from smdistributed.modelparallel.torch.state_mod import state as smp_state
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from tensor_cases.published import BOTH, SHARDED, distributed, of_one_process, train

OTHERS = [BOTH, {**BOTH, "partitions": 1}, {**BOTH, "tensor_parallel_degree": 4, "partitions": 1}]


def masters_of(optimizer):
    return [master for _, master in optimizer.pairs]


def axis_of(optimizer, master):
    return next(get_distribution_axis(parameter) for parameter, copied in optimizer.pairs if copied is master)


def whole_masters(optimizer):
    """The float32 copies of all ranks of one copy of the model, by name."""
    masters = masters_of(optimizer)
    ids = smp.allgather([id(master) for master in masters], smp.TP_GROUP)
    values = smp.allgather([master.detach() for master in masters], smp.TP_GROUP)
    index_of = smp.allgather(optimizer._param_id_to_index(), smp.TP_GROUP)
    names, indices = smp_state.param_index_to_name_tp_group, smp_state.param_name_to_index_tp_group
    assert len(names) == len(indices) == smp.tp_size() and not optimizer.redefined_params
    found = {}
    for master, number in zip(masters, ids[0]):
        name = names[0][index_of[0][number]]
        parts = []
        for rank in range(smp.tp_size()):
            other = {index: key for key, index in index_of[rank].items()}[indices[rank][name]]
            parts.append(values[rank][ids[rank].index(other)])
        axis = axis_of(optimizer, master)
        found[name] = parts[0] if axis is None else torch.cat(parts, axis)
    whole = {}
    for stage in smp.allgather(found, smp.PP_GROUP):
        assert not whole.keys() & stage.keys()
        whole |= stage
    return whole


def load_whole_masters(optimizer, values):
    names, index_of = smp_state.param_index_to_name_tp_group[smp.tp_rank()], optimizer._param_id_to_index()
    with torch.no_grad():
        for master in masters_of(optimizer):
            value, axis = values[names[index_of[id(master)]]], axis_of(optimizer, master)
            if axis is not None:
                size = value.size(axis) // smp.tp_size()
                value = value.narrow(axis, size * smp.tp_rank(), size)
            master.copy_(value)


def case_whole_copies_and_state_resume_under_other_degrees(directory):
    losses, alone = of_one_process(torch.float32, range(4))
    _, before = of_one_process(torch.float32, range(2))
    with job(**BOTH):
        with pytest.raises(RuntimeError, match=r"param_index_to_name_tp_group on rank \d: make the smp\.Distr"):
            smp_state.param_index_to_name_tp_group  # noqa: B018
        model, optimizer = distributed(torch.float32)
        assert train(model, optimizer, range(2)) == pytest.approx(losses[:2], rel=1e-5)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), whole_masters(optimizer)))
        assert saved[2].keys() == saved[0].keys()
        for (_, master), name in zip(before.pairs, saved[0]):
            torch.testing.assert_close(saved[2][name], master.detach(), rtol=1e-4, atol=1e-6)
    for keys in OTHERS:
        with job(**keys):
            model, optimizer = distributed(torch.float32)
            weights, state, masters = copy.deepcopy(saved)
            model.load_state_dict(weights)

            def resume(model, optimizer, state=state, masters=masters):
                def load(model, optimizer):
                    optimizer.load_state_dict(state)
                    load_whole_masters(optimizer, masters)

                model.register_post_partition_hook(load)

            model.register_post_step_hook(resume)
            assert train(model, optimizer, range(2, 4)) == pytest.approx(losses[2:], rel=1e-5)
            after = whole_masters(optimizer)
            for (_, master), name in zip(alone.pairs, saved[0]):
                torch.testing.assert_close(after[name], master.detach(), rtol=1e-4, atol=1e-6)


def case_shared_state_is_a_list_of_the_replicas_states(directory):
    losses, _ = of_one_process(torch.float32, range(4))
    for number, keys in enumerate(SHARDED):
        keys = {**keys, "microbatches": 2, "ddp": True, "shard_optimizer_state": True}
        with job(**keys):
            model, optimizer = distributed(torch.float32)
            train(model, optimizer, range(2))
            own = optimizer.local_state_dict()
            assert_own_state(own, optimizer)
            values = {"model": model.local_state_dict(), "optimizer": own}
            values["masters"] = smp.allgather([m.detach() for m in masters_of(optimizer)], smp.RDP_GROUP)
            if smp.rdp_rank() == 0:
                smp.save(values, f"{directory}/{number}.pt", partial=True)
            smp.barrier()
        with job(**keys):
            model, optimizer = distributed(torch.float32)
            values = smp.load(f"{directory}/{number}.pt", partial=True)
            model.load_state_dict(values["model"])

            def resume(model, optimizer, values=values):
                optimizer.load_state_dict(values["optimizer"])
                assert_own_state(values["optimizer"], optimizer)
                with torch.no_grad():
                    for master, value in zip(masters_of(optimizer), values["masters"][smp.rdp_rank()], strict=True):
                        master.copy_(value)

            model.register_post_step_hook(resume)
            assert train(model, optimizer, range(2, 4)) == pytest.approx(losses[2:], rel=1e-5)
    with job(partitions=2, ddp=True, microbatches=2, shard_optimizer_state=True):
        model, optimizer = pipelines.wrapped()
        pipelines.train(model, optimizer, range(1))
        before, own = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.local_state_dict())
        assert_own_state(own, optimizer)
        pipelines.train(model, optimizer, range(1, 2))
        optimizer.load_state_dict(own)
        torch.testing.assert_close(optimizer.state_dict(), before)
        with pytest.raises(ValueError, match="is a list of 2 replicas' states without their numbers"):
            optimizer.load_state_dict({key: own[key] for key in ("state", "param_groups")})


def assert_own_state(values, optimizer):
    """Scripts compare a replica's element of the list with its own torch optimizer's state, key by key."""
    assert isinstance(values["state"], list) and len(values["state"]) == smp.rdp_size()
    own = optimizer.orig_state_dict()["state"]
    assert own and values["state"][smp.rdp_rank()].keys() == own.keys()
    for index, of_parameter in own.items():
        torch.testing.assert_close(values["state"][smp.rdp_rank()][index], of_parameter)
