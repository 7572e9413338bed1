"""Sharded data parallelism over the ranks with the same tensor shard: the numbers and states of one process."""

from __future__ import annotations

import copy
import itertools
import os

import lm_training
import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from front_cases.optimizers import assert_same
from lm_training import batch, loss_of, mine, train, train_step
from smddp.modelparallel import delayed
from smddp.modelparallel.tensor.split import split_of
from tensor_cases.families import adam, check, made, one_process
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

SHARDED = {"sharded_data_parallel_degree": 2, "ddp": True, "microbatches": 2, "sdp_gradient_clipping": 0.5}
BOTH = {**SHARDED, "tensor_parallel_degree": 2}
PRECISIONS = [({}, {}), ({"bf16": True}, {}), ({"fp16": True}, {"static_loss_scale": 64.0})]


def gpt2():
    return lm_training.gpt2(layers=2, heads=4)


def wrapped(seed=0, family=gpt2, **options):
    with smp.tensor_parallelism():
        model = smp.DistributedModel(made(family, seed))
    return model, smp.DistributedOptimizer(adam(model), **options)


def check_cell(directory, keys, precision, scale, family=gpt2):
    """Training, then both forms of checkpoints, resumed under the same degrees: the numbers of one process."""
    losses, norms, *_ = one_process(family, 3)
    half = bool(precision)
    tag = f"{keys}{precision}".replace(" ", "")
    with job(**keys, **precision):
        model, optimizer = wrapped(0, family, **scale)
        assert all(isinstance(q, DTensor) and q.dtype == torch.float32 for q in model.parameters())
        assert any(split_of(q) for q in model.parameters())
        found = train(model, optimizer, range(2))
        smp.save_checkpoint(directory, f"{tag}parts", user_content=tag)
        smp.save_checkpoint(directory, f"{tag}whole", partial=False)
        values, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        rest = train(model, optimizer, range(2, 3))
        assert found[0] + rest[0] == pytest.approx(losses, rel=0.02 if half else 1e-6), tag
        assert found[1] + rest[1] == pytest.approx(norms, rel=0.03 if half else 1e-5), tag
    for form in ("parts", "whole"):
        with job(**keys, **precision):
            model, optimizer = wrapped(1, family, **scale)
            content = smp.resume_from_checkpoint(directory, f"{tag}{form}", partial=form == "parts")
            assert content == (tag if form == "parts" else None)
            assert_same(dict(model.state_dict()), dict(values), exact=True)
            assert_same(optimizer.state_dict(), whole, exact=True)
            if form == "parts":
                assert train(model, optimizer, range(2, 3)) == rest, tag
    if not half:
        alone = made(family, seed=1)
        alone.load_state_dict(torch.load(f"{directory}/{tag}whole"))
        adam(alone).load_state_dict(torch.load(f"{directory}/optimizer_{tag}whole"))
        assert loss_of(alone, batch(2)).item() == pytest.approx(losses[2], rel=1e-6)


def case_both_degrees_train_as_one_process(directory):
    check(gpt2, {**SHARDED, "sdp_param_persistence_threshold": 0, "placement_strategy": "spread"}, True)


def case_every_precision_trains_and_resumes(directory):
    for (precision, scale), prescaled in zip(PRECISIONS, itertools.cycle((False, True))):
        check_cell(directory, {**BOTH, "prescaled_batch": prescaled}, precision, scale)


LAYOUTS = [
    BOTH,
    {**BOTH, "tensor_parallel_degree": 4, "sharded_data_parallel_degree": 1, "prescaled_batch": True},
    {**BOTH, "tensor_parallel_degree": 1, "sharded_data_parallel_degree": 4},
    {**BOTH, "pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 1},
    {**BOTH, "sharded_data_parallel_degree": 1, "shard_optimizer_state": True},
]


def check_move(directory, source, target):
    """A partial checkpoint of the layout ``source`` has its values under ``target``."""
    _, _, _, alone, optimizer_alone = one_process(gpt2)

    def cut(model, optimizer):
        if not model.partitioned:
            train_step(model, mine(0))
            optimizer.zero_grad()

    with job(**source):
        model, optimizer = wrapped()
        model.load_state_dict(copy.deepcopy(alone.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(optimizer_alone.state_dict()))
        cut(model, optimizer)
        smp.save_checkpoint(directory, "moved")
    with job(**target):
        model, optimizer = wrapped(seed=1)
        smp.resume_from_checkpoint(directory, "moved")
        cut(model, optimizer)
        assert_same(dict(model.state_dict()), dict(alone.state_dict()), exact=True)
        assert_same(optimizer.state_dict()["state"], optimizer_alone.state_dict()["state"], exact=True)


def case_checkpoints_move_between_degrees(directory):
    check_move(directory, LAYOUTS[4], LAYOUTS[0])


def case_parts_files_and_views_name_both_groups(directory):
    with job(**BOTH):
        model, optimizer = wrapped()
        train(model, optimizer, range(1))
        assert (smp.rdp_size(), smp.dp_size(), smp.mp_size()) == (2, 4, 2)
        smp.save_checkpoint(directory, "parts")
        files = [f"{what}_0_{tp}_{shard}.pt" for what in ("model", "optimizer") for tp in (0, 1) for shard in (0, 1)]
        assert sorted(os.listdir(f"{directory}/parts_partial")) == ["files.json", *files]
        own, state = copy.deepcopy((model.local_state_dict(), optimizer.local_state_dict()))
        values, whole = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert own["_smp_is_partial"] and state["_smp_is_partial"]
        # Rows over the tensor group, then over the shard group.
        assert own["transformer.wte.weight"].shape == (64 // 2 // 2, 16)
        place = f"{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}"
        smp.save({"model": own, "optimizer": state}, f"{directory}/by_hand")
        smp.barrier()
        assert os.path.exists(f"{directory}/by_hand_{place}")
        train(model, optimizer, range(1, 2))
        mine_again = smp.load(f"{directory}/by_hand")
        model.load_state_dict(mine_again["model"])
        optimizer.load_state_dict(mine_again["optimizer"])
        assert_same(dict(model.state_dict()), dict(values), exact=True)
        assert_same(optimizer.state_dict(), whole, exact=True)
        # Pieces of the views add up to this tensor shard.
        weight = model.get_module().transformer.wte.weight
        norm = torch.linalg.norm(weight.ds_tensor.data) ** 2
        torch.distributed.all_reduce(norm, group=optimizer.ds_param_shard_group)
        part = split_of(weight).mine(values["transformer.wte.weight"])
        assert norm.sqrt().item() == pytest.approx(part.norm().item(), rel=1e-4) and weight.ds_shape == part.shape
        other = smp.load(f"{directory}/by_hand_0_{1 - smp.tp_rank()}_{smp.rdp_rank()}", partial=False)
        for load, name in ((model.load_state_dict, "model"), (optimizer.load_state_dict, "optimizer")):
            with pytest.raises(ValueError, match=r"saved by rank \d of 2 in its tensor group, and this is rank \d"):
                load(other[name])


def case_one_bad_gradient_skips_the_step_of_all_ranks(directory):
    for keys in ({"fp16": True}, {}):
        with job(**BOTH, **keys):
            scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0}}
            model, optimizer = wrapped(**scale if keys else {})
            scaler = None if keys else smp.amp.GradScaler("cpu", init_scale=64.0)
            before = copy.deepcopy(model.state_dict())
            if scaler is not None:
                scaler.scale(torch.ones(()))
            train_step(model, mine(0))
            gradients = [q.grad.to_local().clone() for q in model.parameters()]
            for bad_rank in range(4):
                for q, gradient in zip(model.parameters(), gradients):
                    q.grad.to_local().copy_(gradient)
                if smp.rank() == bad_rank:
                    model.get_module().transformer.wte.weight.grad.to_local()[0, 0] = float("nan")
                if scaler is None:
                    optimizer.step()
                    assert optimizer.overflow and optimizer.loss_scale == 64.0 / 2 ** (bad_rank + 1)
                else:
                    scaler.step(optimizer)
                    scaler.update()
                    assert scaler.get_scale() == 64.0 / 2 ** (bad_rank + 1)
                assert_same(dict(model.state_dict()), dict(before), exact=True)


def case_norms_count_each_element_once(directory):
    alone = made(gpt2)
    loss_of(alone, batch(0)).backward()
    with job(**BOTH):
        model, optimizer = wrapped()
        train_step(model, mine(0))
        for kind in (float("inf"), 1.0, 2.0):
            total = clip_grad_norm_(alone.parameters(), 1e9, kind).item()
            assert clip_grad_norm_(model.parameters(), 1e9, kind).item() == pytest.approx(total, rel=1e-5)
            assert optimizer.clip_master_grads(total / 2, kind).item() == pytest.approx(total, rel=1e-5)
            assert optimizer.clip_master_grads(1e9, kind).item() == pytest.approx(total / 2, rel=1e-4)
            clip_grad_norm_(alone.parameters(), total / 2, kind)


def on_meta():
    torch.manual_seed(0)
    with smp.tensor_parallelism(), smp.delay_param_initialization():
        return gpt2()


def case_delayed_values_reach_optimizers_that_are_older(directory):
    with job(ddp=True):
        alone = on_meta()
        delayed.everywhere(alone, torch.initial_seed())
        before = copy.deepcopy(alone.state_dict())
    optimizer_alone = adam(alone)
    loss = loss_of(alone, batch(0))
    loss.backward()
    clip_grad_norm_(alone.parameters(), 0.5)
    optimizer_alone.step()
    of_both = {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.5}
    for keys in ({}, {"tensor_parallel_degree": 2}, of_both):
        with job(ddp=True, microbatches=2, delayed_parameter_initialization=True, **keys):
            module = on_meta()
            inner = adam(module)
            model = smp.DistributedModel(module)
            optimizer = smp.DistributedOptimizer(inner)
            assert_same(dict(model.state_dict()), dict(before), exact=True)
            smp.set_activation_checkpointing(model.get_module().transformer.seq_layers, strategy="group_2")
            train_step(model, mine(0))
            if keys is not of_both:
                clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-4, atol=1e-6)


def check_fused(kind, **keys):
    alone = made(gpt2)
    inner = kind(alone.parameters(), lr=0.01)
    loss_of(alone, batch(0)).backward()
    inner.step()
    with job(**{**BOTH, "sdp_gradient_clipping": 0.0, **keys}):
        with smp.tensor_parallelism():
            model = smp.DistributedModel(made(gpt2))
        optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.01))
        train_step(model, mine(0))
        optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
        whole = optimizer.state_dict()
        kind(alone.parameters()).load_state_dict(whole)
        optimizer.load_state_dict(optimizer.local_state_dict())
        assert_same(optimizer.state_dict(), whole, exact=True)


def case_degrees_that_do_not_fit_are_refused(directory):
    for keys, text in (
        (
            {"sharded_data_parallel_degree": 4},
            r"=4 does not divide the 2 data-parallel ranks with the same tensor shard \('tensor_parallel_degree'=2\)",
        ),
        ({"pipeline_parallel_degree": 2}, "needs 'pipeline_parallel_degree' 1, got 2"),
        ({"shard_optimizer_state": True}, "shards the state already"),
    ):
        with pytest.raises(ValueError, match=text), job(**{**BOTH, **keys}):
            pass
