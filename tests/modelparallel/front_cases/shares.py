"""The key `shard_optimizer_state`: replicas share the optimizer's state, and step as if each had all of it."""

from __future__ import annotations

import copy
import os

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases import half_precision, pipelines
from front_cases.by_hand import job
from front_cases.optimizers import assert_same
from lm_training import batch, train, train_step

TWO_BY_TWO = {"partitions": 2, "ddp": True, "microbatches": 2, "shard_optimizer_state": True}


def case_replicas_share_the_state_and_train_as_one_process(directory):
    losses, norms, expected = pipelines.one_process(range(4))
    with job(**TWO_BY_TWO):
        model, optimizer = pipelines.wrapped()
        found = train(model, optimizer, range(2))
        assert found[0] == pytest.approx(losses[:2], rel=1e-5) and found[1] == pytest.approx(norms[:2], rel=1e-4)
        # Balanced: no replica has much more than the other, and together they have each once.
        held = sum(value["exp_avg"].numel() for value in optimizer.optimizer.state.values())
        all_held = smp.allgather((smp.pp_rank(), held))
        for stage in range(2):
            shares = [size for at, size in all_held if at == stage]
            whole = sum(q.numel() for q in model.local_parameters()) if stage == smp.pp_rank() else None
            assert max(shares) - min(shares) < 0.2 * sum(shares) and whole in (None, sum(shares))
        values, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        torch.optim.AdamW(pipelines.gpt2().parameters()).load_state_dict(whole)
        smp.save_checkpoint(directory, "parts")
        smp.save_checkpoint(directory, "whole", partial=False)
        files = [f"optimizer_{stage}_0_{replica}.pt" for stage in range(2) for replica in range(2)]
        assert sorted(os.listdir(f"{directory}/parts_partial")) == [
            "files.json",
            "model_0_0.pt",
            "model_1_0.pt",
            *files,
        ]
        smp.save(optimizer.local_state_dict(gather_if_shard=False), f"{directory}/own.pt", v3=True)
        smp.barrier()
        optimizer.load_state_dict(smp.load(f"{directory}/own.pt"))
        assert_same(optimizer.state_dict(), whole, exact=True)
    for keys, tags in (
        ({}, ["parts", "whole"]),
        ({"partitions": 1}, ["parts"]),
        ({"shard_optimizer_state": False}, ["parts"]),
    ):
        for tag in tags:
            with job(**{**TWO_BY_TWO, **keys}):
                model, optimizer = pipelines.wrapped()
                smp.resume_from_checkpoint(directory, tag, partial=tag == "parts")
                found = train(model, optimizer, range(2, 4))
                assert found[0] == pytest.approx(losses[2:], rel=1e-5)
                assert found[1] == pytest.approx(norms[2:], rel=1e-4)
                torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-3, atol=1e-4)
    with job(**TWO_BY_TWO):
        model, optimizer = pipelines.wrapped()
        smp.resume_from_checkpoint(directory, "parts", load_sharded_optimizer_state=False)
        loss = train_step(model, batch(2).chunk(2)[smp.dp_rank()]).reduce_mean().item()
        assert sum(smp.allgather(loss)) / 4 == pytest.approx(losses[2], rel=1e-5)
        assert not optimizer.state_dict()["state"]
        assert_same(dict(model.state_dict()), dict(values), exact=True)
    with pytest.raises(ValueError, match="'shard_optimizer_state' with 'sharded_data_parallel_degree'"):
        smp.init({"ddp": True, "shard_optimizer_state": True, "sharded_data_parallel_degree": 2})


def case_masters_and_lamb_are_stepped_in_shares_as_whole(directory):
    found = {}
    for shared in (False, True):
        keys = {**TWO_BY_TWO, "shard_optimizer_state": shared}
        with job(**keys, fp16=True):
            model, optimizer = half_precision.wrapped(static_loss_scale=128.0)
            losses = half_precision.train(model, optimizer, range(3))
            smp.save_checkpoint(directory, f"half{shared}")
            found["half", shared] = losses, dict(model.state_dict()), optimizer.state_dict()
            model, optimizer = half_precision.wrapped(static_loss_scale=128.0)
            smp.resume_from_checkpoint(directory, f"half{shared}")
            found["again", shared] = (half_precision.train(model, optimizer, range(3, 5)),)
        with job(**keys):
            model = smp.DistributedModel(half_precision.layers())
            inner = smp.optimizers.FusedLAMB(model.parameters(), lr=0.02, max_grad_norm=0.1)
            optimizer = smp.DistributedOptimizer(inner)
            for number in range(2):
                half_precision.train_step(model, half_precision.batch(number))
                optimizer.step()
                optimizer.zero_grad()
            found["lamb", shared] = (dict(model.state_dict()),)
    for name in ("half", "again", "lamb"):
        torch.testing.assert_close(found[name, True], found[name, False], rtol=1e-5, atol=1e-6)
