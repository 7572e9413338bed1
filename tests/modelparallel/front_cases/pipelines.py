"""Optimizer, checkpoints and activation checkpointing over real pipelines, held against one process."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import lm_training
import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import batch, loss_of, train, train_alone
from torch import nn
from torch.nn.utils import clip_grad_norm_


def gpt2():
    torch.manual_seed(0)
    return lm_training.gpt2()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_process(numbers):
    """Losses, gradient norms, and the model after them."""
    model = gpt2()
    return *train_alone(model, adam(model), numbers), model


def wrapped():
    model = smp.DistributedModel(gpt2())
    return model, smp.DistributedOptimizer(adam(model))


def case_a_tied_gpt2_trains_saves_and_resumes_with_the_losses_of_one_process(directory):
    losses, norms, expected = one_process(range(4))
    with job(partitions=4, microbatches=4):
        model, optimizer = wrapped()
        found = train(model, optimizer, range(2))
        assert found[0] == pytest.approx(losses[:2], rel=1e-5) and found[1] == pytest.approx(norms[:2], rel=1e-4)
        smp.save_checkpoint(directory, "parts", user_content={"step": 2})
        smp.save_checkpoint(directory, "whole", partial=False)
        alone = gpt2()
        alone.load_state_dict(torch.load(f"{directory}/whole"))
        assert loss_of(alone, batch(2)).item() == pytest.approx(losses[2], rel=1e-5)
    for tag, partial in (("parts", True), ("whole", False)):
        with job(partitions=2, microbatches=2, pipeline="simple", ddp=True):
            model, optimizer = wrapped()
            content = smp.resume_from_checkpoint(directory, tag, partial=partial)
            assert content == ({"step": 2} if partial else None)
            found = train(model, optimizer, range(2, 4))
            assert found[0] == pytest.approx(losses[2:], rel=1e-5) and found[1] == pytest.approx(norms[2:], rel=1e-4)
            whole = model.state_dict()
            assert whole.keys() == expected.state_dict().keys()
            torch.testing.assert_close(dict(whole), dict(expected.state_dict()), rtol=1e-3, atol=1e-4)
            assert whole["lm_head.weight"].data_ptr() == whole["transformer.wte.weight"].data_ptr()


def case_checkpointed_activations_change_no_gradient(directory):
    found = []
    for checkpointed in (False, True):
        with job(partitions=2, microbatches=2, ddp=True):
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4)]
            model = smp.DistributedModel(nn.Sequential(*blocks))
            if checkpointed:
                smp.set_activation_checkpointing(model.get_module())

            @smp.step
            def step(model, x):
                loss = model(x).square().sum()
                model.backward(loss)
                return loss

            torch.manual_seed(7)
            loss = step(model, torch.randn(4, 8)).reduce_mean()
            found.append((loss.item(), [p.grad for p in model.local_parameters()]))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))
    with job(partitions=2, microbatches=2, ddp=True):
        model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        seen = []
        model.register_post_step_hook(lambda *given: seen.append(given))
        for _ in range(2):
            step(model, torch.randn(4, 8))
        assert seen == [(model, None)]  # after the next step, once
        with pytest.raises(RuntimeError, match="checkpointing of Linear comes after the cut"):
            smp.set_activation_checkpointing(model.get_module()[0])


def case_a_cut_is_kept_in_a_file_and_read_again(directory):
    file = f"{directory}/cut.json"
    with job(partitions=4, microbatches=4, partition_file=file):
        model, optimizer = wrapped()
        losses, _ = train(model, optimizer, range(1))
    with open(file) as kept:
        where = json.load(kept)
    assert {where[name] for name in where} == {0, 1, 2, 3}
    moved = {**where, "transformer.h.1.attn": 3}
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        with open(file, "w") as kept:
            json.dump(moved, kept)
    with job(partitions=4, microbatches=4, partition_file=file, load_partition=True):
        model, optimizer = wrapped()
        assert train(model, optimizer, range(1))[0] == losses
        assert model.stage_of_parameter("transformer.h.1.attn.c_attn.weight") == 3
    with job(partitions=2, microbatches=4, partition_file=file, load_partition=True, ddp=True):
        model, optimizer = wrapped()
        with pytest.raises(ValueError, match=r"has '.*' on stage [23]; expected 0 to 1"):
            train(model, optimizer, range(1))


def case_a_step_is_drawn_as_planned_and_as_measured(directory):
    with job(partitions=4, microbatches=4):
        model, optimizer = wrapped()
        train(model, optimizer, range(2))
        text = smp.explain(f"{directory}/step.json")
        smp.explain(f"{directory}/step.svg")
        drawn = [line.split()[2] for line in text.splitlines() if line.startswith("stage ")]
        assert (
            drawn[3] == "...0aa1bb2cc3dd" + "." * 6 and drawn[0].startswith("0123") and len(set(map(len, drawn))) == 1
        )
        if smp.rank() == 0:
            with open(f"{directory}/step.json") as file:
                bars = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
            for stage in range(4):
                for track in (0, 1):  # the plan, what was measured
                    own = sorted((bar for bar in bars if (bar["pid"], bar["tid"]) == (stage, track)), key=starts)
                    for piece in ("forward", "backward"):
                        numbers = {bar["args"]["microbatch"] for bar in own if bar["name"].startswith(piece)}
                        assert numbers == {0, 1, 2, 3}, (stage, track, piece)
                    assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(own))
            root = ElementTree.parse(f"{directory}/step.svg").getroot()
            labels = [element.text for element in root if element.tag.endswith("text")]
            assert {f"stage {stage}, {track}" for stage in range(4) for track in ("plan", "measured")} <= set(labels)


def starts(bar):
    return bar["ts"]


def case_a_scaled_loss_trains_as_an_unscaled_one(directory):
    found = []
    for scale in (None, 256.0):
        with job(partitions=4, microbatches=2):
            torch.manual_seed(0)
            model = smp.DistributedModel(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            scaler = smp.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

            @smp.step
            def step(model, x, scaler):
                loss = model(x).square().mean()
                model.backward(scaler.scale(loss))
                return loss

            for number in range(2):
                step(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(number)), scaler)
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append(dict(model.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
