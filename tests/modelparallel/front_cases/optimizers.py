"""The optimizer over a stage's parameters: it equals the same optimizer in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from front_cases.by_hand import OTHERWISE, WHERE, HandCut, Net, give, gradients, job
from smddp.modelparallel.checkpointing import objects
from smddp.modelparallel.optim import amp
from smddp.modelparallel.optim.optimizer import DistributedOptimizer
from smddp.modelparallel.optim.optimizers import FusedLAMB
from smddp.modelparallel.state import state
from torch.nn.utils import clip_grad_norm_  # bound before `init`, as scripts do


def groups(module):
    decayed = [p for p in module.parameters() if p.ndim > 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in module.parameters() if p.ndim < 2]}]


def steps(module, optimizer, numbers, max_norm=0.5):
    """Steps in one process: gradients, clipping, step."""
    norms = []
    for number in numbers:
        give(module, one_process_gradients(number))
        norms.append(clip_grad_norm_(module.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def one_process_gradients(number):
    return gradients(Net(), number)


def reference(numbers, optimizer_class=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    module = Net()
    optimizer = optimizer_class(groups(module), lr=0.1, **options)
    return module, optimizer, steps(module, optimizer, numbers)


def cut_model(where, optimizer_class=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = HandCut(Net(), where)
    optimizer = DistributedOptimizer(optimizer_class(groups(model.module), lr=0.1, **options))
    return model, optimizer


def assert_same(found, expected, exact=False):
    """Compare whole states: equal up to one rounding of the norm."""
    torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


def case_steps_clipped_by_the_whole_models_norm_are_those_of_one_process(directory):
    expected, of_one, norms = reference(range(3))
    with job(partitions=4):
        model, optimizer = cut_model(WHERE)
        model.cut()
        assert [len(group["params"]) for group in optimizer.param_groups] == {0: [1, 1], 1: [1, 3], 2: [1, 1]}.get(
            state.ranks.pp_rank, [0, 0]
        )
        torch.testing.assert_close(steps(model.module, optimizer, range(3)), norms, rtol=1e-6, atol=0)
        assert_same(model.state_dict(), expected.state_dict())
        whole = optimizer.state_dict()
        assert whole.keys() == of_one.state_dict().keys()
        assert_same(whole, of_one.state_dict())


def case_norms_of_other_tensors_are_each_ranks_own(directory):
    with job(partitions=4):
        model, _ = cut_model(WHERE)
        model.cut()
        loose = torch.zeros(3, requires_grad=True)
        loose.grad = torch.full((3,), float(state.ranks.rank + 1))
        assert clip_grad_norm_([loose], 1e9).item() == pytest.approx(3**0.5 * (state.ranks.rank + 1))
        give(model.module, one_process_gradients(0))
        largest = max(g.abs().max().item() for g in one_process_gradients(0).values())
        assert clip_grad_norm_(model.module.parameters(), 1e9, float("inf")).item() == pytest.approx(largest)
        if state.ranks.rank == 2:
            next(model.local_parameters()).grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite on all stages"):
            clip_grad_norm_(model.module.parameters(), 1.0, error_if_nonfinite=True)


def case_a_whole_state_and_a_part_resume_after_the_cut_they_waited_for(directory):
    expected, of_one, _ = reference(range(4))
    _, half, _ = reference(range(2))
    half_state = copy.deepcopy(half.state_dict())
    with job(partitions=2, ddp=True):
        # Two steps of one process, then two here; the model's values come from the same two steps.
        model, optimizer = cut_model(OTHERWISE)
        model.load_state_dict(reference(range(2))[0].state_dict())
        optimizer.load_state_dict(half_state)
        model.cut()
        assert_same(optimizer.state_dict(), half_state, exact=True)
        steps(model.module, optimizer, range(2, 3))
        part, values = copy.deepcopy(optimizer.local_state_dict()), copy.deepcopy(model.local_state_dict())
        assert part["_smp_is_partial"] and values["_smp_is_partial"]
        whole = copy.deepcopy(optimizer.state_dict())
        again, after = cut_model(OTHERWISE)
        again.load_state_dict(values)
        after.load_state_dict(part)
        again.cut()
        assert_same(after.state_dict(), whole, exact=True)
        steps(again.module, after, range(3, 4))
        assert_same(again.state_dict(), expected.state_dict())
        assert_same(after.state_dict(), of_one.state_dict())
        part["_smp_params"] = [99]
        with pytest.raises(ValueError, match="saved under another cut"):
            after.load_state_dict(part)
        with pytest.raises(ValueError, match=r"groups of \[3, 5\] parameters, the loaded state of \[1\]"):
            after.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def case_schedulers_hooks_and_new_groups_work_through_it(directory):
    with job(partitions=2, ddp=True):
        model, optimizer = cut_model(OTHERWISE)
        assert isinstance(optimizer, torch.optim.Optimizer) and optimizer._is_accelerate_prepared
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        model.cut()
        steps(model.module, optimizer, range(1))
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05] and seen == ["stepped"]
        assert optimizer.clip_master_grads(1.0).item() == 0.0 == optimizer._global_grad_norm.item()
        assert not optimizer.overflow and not optimizer.step_was_skipped
        later = torch.nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [later]})
        assert optimizer.param_groups[2]["params"] == [later]
        assert optimizer.state_dict()["param_groups"][2]["params"] == [8]
        scaled = {"static_loss_scale": 128.0, "dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000}}
        assert DistributedOptimizer(torch.optim.SGD([later]), **scaled).loss_scale == 1.0
        with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer"):
            DistributedOptimizer(optimizer)


def case_lamb_clips_by_the_whole_models_norm(directory):
    expected, of_one, _ = reference(range(2), FusedLAMB, max_grad_norm=0.1)
    with job(partitions=4):
        model, optimizer = cut_model(WHERE, FusedLAMB, max_grad_norm=0.1)
        model.cut()
        steps(model.module, optimizer, range(2))
        assert_same(model.state_dict(), expected.state_dict())
        assert_same(optimizer.state_dict(), of_one.state_dict())


def case_a_gradient_that_is_not_finite_skips_the_step_on_all_stages(directory):
    with job(partitions=4):
        model, optimizer = cut_model(WHERE, torch.optim.SGD)
        model.cut()
        scaler = amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        before = copy.deepcopy(model.state_dict())
        for number, infinite in enumerate((True, False)):
            give(model.module, one_process_gradients(number))
            if infinite and state.ranks.rank == 1:
                next(model.local_parameters()).grad.fill_(float("inf"))
            scaler.scale(torch.zeros(()))  # as of a loss
            scaler.step(optimizer)
            scaler.update()
            scales = objects.allgather(scaler.get_scale())
            assert scales == [2.0 if infinite else 4.0] * 4
            changed = not all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
            assert changed != infinite
