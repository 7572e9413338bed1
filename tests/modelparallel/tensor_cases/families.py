"""Models of transformers whose layers a tensor group shares, in pipelines and replicas, held against one process."""

from __future__ import annotations

import functools

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import batch, gpt2, loss_of, train
from smddp.modelparallel.tensor.split import split_of
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

LAYOUTS = [{"pipeline_parallel_degree": 2, "microbatches": 2}, {"ddp": True, "microbatches": 2}]


def llama():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)
    return AutoModelForCausalLM.from_config(config)


def made(family, seed=0):
    torch.manual_seed(seed)
    return family()


def adam(model):
    # With such an eps, a gradient that is all but zero does not decide by its last bit where a parameter goes.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


@functools.cache
def one_process(family, steps=2):
    """Losses, norms, the first step's gradients, the model and its optimizer."""
    model = made(family)
    optimizer, losses, norms, gradients = adam(model), [], [], {}
    for number in range(steps):
        # By microbatches and replicas, as the other side sums.
        parts = batch(number).chunk(4)
        found = [loss_of(model, part) for part in parts]
        for loss in found:
            (loss / len(parts)).backward()
        gradients = gradients or {name: q.grad.clone() for name, q in model.named_parameters()}
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).mean().item())
    return losses, norms, gradients, model, optimizer


def wrapped(family, seed=0):
    with smp.tensor_parallelism():
        model = made(family, seed)
    model = smp.DistributedModel(model)
    return model, smp.DistributedOptimizer(adam(model))


def same_gradients(model, wanted, within=1e-6):
    """Near each gradient, by its largest element, or by a tenth of the model's where one is all but zero."""
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    shared = 0
    for name, q in model.local_named_parameters():
        split = split_of(q)
        shared += split is not None
        expected = wanted[name] if split is None else split.mine(wanted[name])
        scale = max(expected.abs().max().item(), 0.1 * largest)
        gradient = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
        worst = (gradient - expected).abs().max().item() / scale
        assert worst < within, (name, worst)
    assert shared


def check(family, layout, prescaled, degree=2, within=1e-6):
    losses, norms, gradients, alone, optimizer_alone = one_process(family)
    with job(tensor_parallel_degree=degree, prescaled_batch=prescaled, **layout):
        model, optimizer = wrapped(family)

        def after_backward(number):
            if number == 0:
                same_gradients(model, gradients, within)

        found, found_norms = train(model, optimizer, range(2), after_backward)
        assert found == pytest.approx(losses, rel=1e-6) and found_norms == pytest.approx(norms, rel=1e-5)
        whole = model.state_dict()
        assert whole.keys() == alone.state_dict().keys()
        torch.testing.assert_close(dict(whole), dict(alone.state_dict()), rtol=1e-4, atol=1e-6)
        state, wanted = optimizer.state_dict(), optimizer_alone.state_dict()
        assert state.keys() == wanted.keys() and state["param_groups"] == wanted["param_groups"]
        torch.testing.assert_close(state["state"], wanted["state"], rtol=1e-4, atol=1e-6)


def case_gpt2_trains_as_in_one_process(directory):
    for layout in LAYOUTS:
        check(gpt2, layout, False)


def case_llama_trains_as_in_one_process(directory):
    for layout in LAYOUTS:
        check(llama, layout, True)
