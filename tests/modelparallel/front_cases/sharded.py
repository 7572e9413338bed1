"""Sharded data parallelism: ranks share the parameters, and train as one process does."""

from __future__ import annotations

import copy
import os

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases import pipelines
from front_cases.by_hand import job
from front_cases.optimizers import assert_same
from lm_training import batch, loss_of, train, train_step
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

TWO_BY_TWO = {"sharded_data_parallel_degree": 2, "ddp": True, "microbatches": 2, "sdp_gradient_clipping": 0.5}


def wrapped(**options):
    model = smp.DistributedModel(pipelines.gpt2())
    return model, smp.DistributedOptimizer(pipelines.adam(model), **options)


def case_two_shards_by_two_copies_train_as_one_process(directory):
    losses, norms, expected = pipelines.one_process(range(3))
    for keys in ({}, {"sdp_param_persistence_threshold": 0}, {"sharded_data_parallel_degree": 4, "pipeline": "simple"}):
        with job(**{**TWO_BY_TWO, **keys}):
            model, optimizer = wrapped()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            found = train(model, optimizer, range(3))
            assert found[0] == pytest.approx(losses, rel=1e-6) and found[1] == pytest.approx(norms, rel=1e-6)
            torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-4, atol=1e-5)


def case_gradients_are_those_of_one_process(directory):
    alone = pipelines.gpt2()
    loss_of(alone, batch(0)).backward()
    total = clip_grad_norm_(alone.parameters(), 1e9).item()
    with job(**TWO_BY_TWO):
        model, optimizer = wrapped()
        train_step(model, batch(0).chunk(4)[smp.rank()])
        assert clip_grad_norm_(model.parameters(), 1e9).item() == pytest.approx(total, rel=1e-6)
        names = dict(alone.named_parameters())
        for name, parameter in model.get_module().named_parameters():
            wanted = names[name].grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-6)
        before = clip_grad_norm_(model.parameters(), total / 2)
        assert before.item() == pytest.approx(total, rel=1e-6)
        assert optimizer.clip_master_grads(1e9).item() == pytest.approx(total / 2, rel=1e-4)
        assert clip_grad_norm_(model.parameters(), 1e9, float("inf")).item() > 0


def case_shards_resume_under_any_degree(directory):
    losses, norms, _ = pipelines.one_process(range(4))
    with job(**TWO_BY_TWO):
        model, optimizer = wrapped()
        train(model, optimizer, range(2))
        smp.save_checkpoint(directory, "parts", user_content={"step": 2})
        smp.save_checkpoint(directory, "whole", partial=False)
        files = [f"{what}_0_0_{shard}.pt" for what in ("model", "optimizer") for shard in range(2)]
        assert sorted(os.listdir(f"{directory}/parts_partial")) == ["files.json", *files, "user_content.pt"]
        own = model.local_state_dict()
        assert own["_smp_is_partial"] and own["transformer.wte.weight"].shape == (32, 16)
        values, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        assert values["lm_head.weight"] is values["transformer.wte.weight"]
        alone = pipelines.gpt2()
        alone.load_state_dict(torch.load(f"{directory}/whole"))
        pipelines.adam(alone).load_state_dict(torch.load(f"{directory}/optimizer_whole"))
        assert loss_of(alone, batch(2)).item() == pytest.approx(losses[2], rel=1e-5)
        # The rank's own part, as `smp.save` keeps it.
        part = copy.deepcopy((own, optimizer.local_state_dict()))
        train(model, optimizer, range(2, 3))
        model.load_state_dict(part[0])
        optimizer.load_state_dict(part[1])
        assert_same(dict(model.state_dict()), dict(values), exact=True)
        assert_same(optimizer.state_dict(), whole, exact=True)
    stages = {"sharded_data_parallel_degree": 1, "partitions": 2}
    for keys, tags in (({}, ["parts"]), ({"sharded_data_parallel_degree": 4}, ["parts", "whole"]), (stages, ["parts"])):
        for tag in tags:
            with job(**{**TWO_BY_TWO, **keys}):
                model, optimizer = wrapped()
                smp.resume_from_checkpoint(directory, tag, partial=tag == "parts")
                if "partitions" in keys:
                    found = train(model, optimizer, range(2, 4))
                else:
                    assert_same(dict(model.state_dict()), dict(values), exact=True)
                    assert_same(optimizer.state_dict(), whole, exact=True)
                    found = train(model, optimizer, range(2, 4))
                assert found[0] == pytest.approx(losses[2:], rel=1e-5) and found[1] == pytest.approx(
                    norms[2:], rel=1e-4
                )
                if keys.get("sharded_data_parallel_degree") == 4:
                    with pytest.raises(ValueError, match=r"saved by rank \d of 2 .* this is rank \d of 4"):
                        model.load_state_dict(part[0])
    with job(partitions=2, ddp=True, microbatches=2):
        model, optimizer = pipelines.wrapped()
        train(model, optimizer, range(2))
        smp.save_checkpoint(directory, "stages")
    with job(**TWO_BY_TWO):
        model, optimizer = wrapped()
        smp.resume_from_checkpoint(directory, "stages")
        assert train(model, optimizer, range(2, 4))[0] == pytest.approx(losses[2:], rel=1e-5)


def case_half_precision_has_float32_masters(directory):
    losses, _, _ = pipelines.one_process(range(3))
    for keys, scale in (({"bf16": True}, {}), ({"fp16": True}, {"static_loss_scale": 64.0})):
        with job(**TWO_BY_TWO, **keys):
            model, optimizer = wrapped(**scale)
            seen = []
            model.get_module().transformer.h[0].attn.c_attn.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append((module.weight.dtype, args[0].dtype))
            )
            found = train(model, optimizer, range(3))
            half = torch.bfloat16 if "bf16" in keys else torch.float16
            assert set(seen) == {(half, half)}
            assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
            assert found[0] == pytest.approx(losses, rel=0.02)
    with job(**TWO_BY_TWO, fp16=True):
        scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**40}}
        model, optimizer = wrapped(**scale)
        before = copy.deepcopy(model.state_dict())
        train_step(model, batch(0).chunk(4)[smp.rank()])
        optimizer.step()
        assert optimizer.step_was_skipped and optimizer.loss_scale == 2.0**39
        assert_same(dict(model.state_dict()), dict(before), exact=True)
        smp.save_checkpoint(directory, "scale")
        _, after = wrapped(**scale)
        smp.resume_from_checkpoint(directory, "scale")
        assert after.loss_scale == 2.0**39


def case_settings_that_contradict_sharding_are_errors(directory):
    for keys, text in (
        ({"sharded_data_parallel_degree": 3}, r"=3 does not divide the 4 .* these do: 1, 2, 4"),
        ({"partitions": 2}, "needs 'pipeline_parallel_degree' 1, got 2"),
        ({"bf16": True, "fp16": True}, "exclude each other"),
        ({"bf16": True, "sharded_data_parallel_degree": 1}, "'bf16': True belongs to"),
    ):
        with pytest.raises(ValueError, match=text), job(**{**TWO_BY_TWO, **keys}):
            pass
    with job(**TWO_BY_TWO):
        model = smp.DistributedModel(nn.Linear(4, 4))

        @smp.step
        def half_of_them(model, x, go):
            loss = model(x).sum()
            if bool(go):
                model.backward(loss)
            return loss

        with pytest.raises(RuntimeError, match=r"last microbatch had no model\.backward"):
            half_of_them(model, torch.randn(4, 4), torch.tensor([True, False]))


def case_an_optimizer_may_be_older_than_the_sharded_model(directory):
    losses, _, _ = pipelines.one_process(range(2))
    with job(**TWO_BY_TWO):
        module = pipelines.gpt2()
        inner = pipelines.adam(module)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(inner)
        assert train(model, optimizer, range(2))[0] == pytest.approx(losses, rel=1e-6)
        smp.set_activation_checkpointing(model.get_module().transformer.h[0])
        with torch.no_grad():
            model(input_ids=batch(0))
        train(model, optimizer, range(1))


def case_fused_optimizers_step_shards_as_whole_tensors(directory):
    for kind in (smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad):
        alone = pipelines.gpt2()
        inner = kind(alone.parameters(), lr=0.01)
        for number in range(2):
            loss_of(alone, batch(number)).backward()
            inner.step()
            inner.zero_grad()
        with job(**{**TWO_BY_TWO, "sdp_gradient_clipping": 0.0}):
            model = smp.DistributedModel(pipelines.gpt2())
            optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.01))
            for number in range(2):
                train_step(model, batch(number).chunk(4)[smp.rank()])
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
            whole = optimizer.state_dict()
            kind(alone.parameters()).load_state_dict(whole)
            optimizer.load_state_dict(optimizer.local_state_dict())
            assert_same(optimizer.state_dict(), whole, exact=True)


def case_a_scaler_decides_over_all_shards(directory):
    with job(**TWO_BY_TWO):
        model, optimizer = wrapped()
        scaler = smp.amp.GradScaler("cpu", init_scale=4.0)
        before = copy.deepcopy(model.state_dict())
        for bad in (True, False):
            scaler.scale(torch.ones(()))
            train_step(model, batch(0).chunk(4)[smp.rank()])
            weight = model.get_module().transformer.wte.weight
            if bad and smp.rank() == 0:
                weight.grad.to_local()[0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(model.state_dict()["transformer.wte.weight"], before["transformer.wte.weight"]) is bad
        assert scaler.get_scale() == 2.0


def case_published_scripts_read_pieces_groups_and_shapes(directory):
    """Norms, offsets and shapes as logging and checkpoint code of published scripts compute them."""
    for keys in ({}, {"bf16": True}, {"sharded_data_parallel_degree": 4}):
        with job(**{**TWO_BY_TWO, **keys}):
            model, optimizer = wrapped()
            offsets, buffers = [], {}
            for number, group in enumerate(optimizer.param_groups):
                first, held = 0, {}
                for q in group["params"]:
                    held[id(q)] = first, q.ds_tensor.ds_numel
                    first += q.ds_tensor.ds_numel
                offsets.append(held)
                flat = optimizer.fp32_partitioned_groups_flat[number]
                assert flat.shape == (first,) and flat.dtype == torch.float32
                buffers |= {key: flat.narrow(0, *place) for key, place in held.items()}
            # Buffers are read while the training goes on.
            train(model, optimizer, range(2))
            whole = model.state_dict()
            for name, q in model.get_module().named_parameters():
                for piece in (buffers[id(q)], q.ds_tensor.data):
                    norm = torch.linalg.norm(piece) ** 2
                    torch.distributed.all_reduce(norm, group=optimizer.ds_param_shard_group)
                    assert norm.sqrt().item() == pytest.approx(whole[name].norm().item(), rel=1e-4)
            names = {q: name for name, q in model.get_module().named_parameters()}
            shapes = {names[q]: q.ds_shape for group in optimizer.fp16_groups for q in group}
            assert shapes == {name: whole[name].shape for name in names.values()}
            assert all(q.ds_numel == whole[name].numel() for q, name in names.items())
            assert torch.equal(flat.narrow(0, 1, 3), flat.data[1:4])
    with job(ddp=True), pytest.raises(AttributeError, match="fp16_groups"):
        _ = wrapped()[1].fp16_groups
