"""The first step of an optimizer: supported forms and rejected models."""

import itertools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.delayed_param import DelayedParamIniter
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.replaced import UntrainedParameters
from smddp.sagemaker.replicas import DifferentReplicas
from smp_cases.expert_models import tiny_moe
from smp_cases.expert_parallel import initialized
from smp_cases.models import batch, config, loss_of, part_of, tiny
from smp_cases.parity import full, wrap1, wrap2
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

ENGINES = {"none": lambda model, _: model, "fsdp1": wrap1, "fsdp2": wrap2}
# Degrees of sharding and tensor parallelism; without FSDP nothing averages gradients.
LAYOUTS = [(2, 1, "fsdp1"), (1, 1, "fsdp1"), (1, 2, "fsdp1"), (2, 1, "fsdp2"), (1, 2, "fsdp2"), (1, 4, "none")]
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, eps=1.0),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=2),
}


def raises(error: type[Exception], body) -> str:
    try:
        body()
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def steps(model, optimizer, ids) -> list[float]:
    """Losses of two steps by closures that compute gradients, after a step without any."""
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 4)
        return mean / 4

    for _ in range(2):
        optimizer.step(closure)
    return losses


def case_steps_by_a_closure_and_without_gradients_are_those_of_one_process():
    wanted = {}
    for kind, make in OPTIMIZERS.items():
        model = tiny(num_hidden_layers=1)
        optimizer = make(model.parameters())
        wanted[kind] = steps(model, optimizer, batch(0)), model.state_dict()
    layouts = [(2, 1, "fsdp1"), (2, 2, "fsdp2"), (1, 4, "none")]
    for (kind, make), (shard, tensor, engine) in itertools.product(OPTIMIZERS.items(), layouts):
        with initialized(1, tensor, shard):
            model = ENGINES[engine](tsm.transform(tiny(num_hidden_layers=1)), False)
            optimizer, mine = make(model.parameters()), part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)
            if kind == "lbfgs" and engine == "fsdp1" and shard > 1:
                text = raises(ValueError, lambda: steps(model, optimizer, mine))  # noqa: B023
                assert "LBFGS adds up over all elements" in text, text
                continue
            if kind != "lbfgs":
                optimizer.step()  # has no gradients, as in schedules that alternate
            losses, values = wanted[kind]
            found = steps(model, optimizer, mine)
            assert all(abs(a - b) < 2e-3 for a, b in zip(found, losses)), (kind, shard, tensor, engine, found, losses)
            if kind != "lbfgs":
                gaps = {name: (value - values[name]).abs().max() for name, value in full(model).items()}
                assert max(gaps.values()) < 1e-5, (kind, shard, tensor, engine, gaps)


def case_an_optimizer_is_refused_for_replaced_parameters_alone():
    for (shard, tensor, engine), late in itertools.product(LAYOUTS, (False, True)):
        with initialized(1, tensor, shard):
            model, plain = tiny(), torch.nn.Linear(2, 2)
            free = torch.optim.SGD(plain.parameters(), lr=0.1)
            free.step()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if late:  # it has trained the model before
                optimizer.step()
            model = ENGINES[engine](tsm.transform(model), False)
            free.step()
            if engine == "fsdp1" and tensor == 1:
                optimizer.step()  # with use_orig_params the model keeps its parameters
                continue
            text = raises(UntrainedParameters, optimizer.step)
            assert "SGD was created before " in text and "embed_tokens.weight" in text, text


def case_an_optimizer_of_parameters_on_meta_is_refused_once_they_have_values():
    with initialized(1, shard=2):
        with torch.device("meta"):
            model = tiny()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        DelayedParamIniter(model, device="cpu").materialize()
        assert "created before materialize()" in raises(UntrainedParameters, optimizer.step)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def _of_the_rank() -> torch.nn.Module:
    """A model whose values depend on the rank."""
    torch.manual_seed(dist.get_rank() + 1)
    return AutoModelForCausalLM.from_config(config("llama"))


def case_replicas_of_different_values_are_refused_at_the_first_step():
    """On every rank, whatever holds the copies."""
    for (shard, tensor, engine), alike in itertools.product(LAYOUTS[:-1], (False, True)):
        with initialized(1, tensor, shard):
            model = ENGINES[engine](tsm.transform(tiny() if alike else _of_the_rank()), False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            get_optimizer_state_dict(model, optimizer)  # takes a step that changes nothing
            loss_of(model, part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)).backward()
            if alike:
                optimizer.step()
                continue
            text = raises(DifferentReplicas, optimizer.step)
            assert raises(DifferentReplicas, optimizer.step) == text  # as often as it is tried
            apart = "rank 0 and rank 1 and rank 2 and rank 3" if (shard, tensor) == (1, 1) else "rank 0 and rank 2"
            assert f"{apart} hold different values of parameter 'model.embed_tokens.weight'" in text, text


def case_replicas_are_compared_in_frozen_parameters_and_experts_and_after_loading():
    for engine in ("fsdp1", "fsdp2"):
        with initialized(1, shard=2):
            model = _of_the_rank()
            model.requires_grad_(False)
            model.lm_head.requires_grad_(True)
            with torch.no_grad():
                model.lm_head.weight.fill_(0.0)
            model = ENGINES[engine](tsm.transform(model), False)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            assert "'model.embed_tokens.weight'" in raises(DifferentReplicas, optimizer.step)
            # Once values are loaded the same step is right.
            model = _of_the_rank()
            model = ENGINES[engine](tsm.transform(model), False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with torch.no_grad():
                for parameter in model.parameters():
                    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(0.5)
            optimizer.step()
        with initialized(2, shard=1):
            model = tiny_moe("mixtral")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "layers.1." in name and ".experts." in name:
                        parameter.add_(float(dist.get_rank() == 3))
            model = ENGINES[engine](tsm.transform(model, config=MoEConfig(moe_load_balancing="none")), False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            text = raises(DifferentReplicas, optimizer.step)
            assert "rank 1 and rank 3 hold different values of parameter 'model.layers.1." in text, text
            assert ".experts." in text, text


def case_models_without_replicas_and_foreign_meshes_are_not_compared():
    with initialized(1, shard=4):
        model = wrap2(tsm.transform(_of_the_rank()), False)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with initialized(1, shard=2):
        torch.manual_seed(dist.get_rank())
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
