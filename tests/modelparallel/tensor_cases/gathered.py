"""`model.cpu()` gives every rank the whole model, as one process has it."""

from __future__ import annotations

import pytest
import torch
from front_cases.by_hand import job
from lm_training import gpt2, mine, train_step
from smddp.modelparallel.checkpointing.cpu_gather import moves_to_cpu
from tensor_cases.families import made, wrapped

LAYOUTS = [
    {"pipeline_parallel_degree": 2},
    {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 4},
    {"sharded_data_parallel_degree": 2},
    {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2},
    {},
]


def case_cpu_gathers_the_parts_of_all_ranks(directory):
    names = {name: (q.shape, q.requires_grad) for name, q in made(gpt2).named_parameters()}
    for layout in LAYOUTS:
        with job(ddp=True, microbatches=2, **layout):
            model, optimizer = wrapped(gpt2)
            train_step(model, mine(0))
            optimizer.step()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            whole = optimizer.state_dict()
            assert model.cpu() is model
            after = model.state_dict()
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], value) for name, value in before.items()), layout
            found = {name: (q.shape, q.requires_grad) for name, q in model.get_module().named_parameters()}
            assert found == names, layout
            assert all(type(q) is torch.nn.Parameter for q in model.parameters())
            alone = made(gpt2, seed=1)
            alone.load_state_dict(model.get_module().state_dict())
            assert optimizer.state_dict().keys() == whole.keys()
            model.load_state_dict(before)
            if layout:
                for called in (lambda model=model: train_step(model, mine(0)), model.local_state_dict):
                    with pytest.raises(RuntimeError, match=r"after model\.cpu\(\)"):
                        called()
            else:
                train_step(model, mine(0))


def case_a_model_on_the_cpu_stays_as_it_is_under_to(directory):
    """Scripts call ``model.to(device)`` before they train."""
    with job(tensor_parallel_degree=2, ddp=True):
        model, _ = wrapped(gpt2)
        shapes = [q.shape for q in model.parameters()]
        assert [q.shape for q in model.to("cpu").parameters()] == shapes
        train_step(model, mine(0))


def case_every_form_of_to_the_cpu_is_recognized(directory):
    """The forms of ``Module.to`` that name a device, for a model whose parameters are elsewhere."""
    model = torch.nn.Linear(2, 2, device="meta")
    like = torch.ones(1)
    forms = [(("cpu",), {}), ((torch.device("cpu"), torch.float16), {}), ((like,), {})]
    forms += [((), {"device": "cpu"}), ((), {"tensor": like})]
    assert all(moves_to_cpu(model, *args, **options) for args, options in forms)
    assert not any(moves_to_cpu(model, *args) for args in [(), (torch.float16,), ("meta",)])
