"""Every family with a plan of our own trains as one process: losses and every gradient, alone and under FSDP."""

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases import family_models
from smp_cases.parity import TOLERANCE, check_gradients, full, wrap1, wrap2
from smp_cases.tensor_parallel import Collectives, differences, initialized


def loss_of(model: torch.nn.Module, arguments: dict) -> torch.Tensor:
    """The loss, of dropout masks that depend on the seed alone."""
    torch.manual_seed(5)
    return model(**arguments).loss


def trains_as_one_process(name: str) -> None:
    """In an initialized world: the loss and every gradient of one batch, which all ranks have."""
    one, model = family_models.tiny(name), tsm.transform(family_models.tiny(name))
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    assert len(layers) in (2, 4), (name, len(layers))  # of encoder and decoder, and nothing else
    arguments = family_models.inputs(one, 0)
    wanted, found = loss_of(one, arguments), loss_of(model, arguments)
    assert abs(wanted - found) < TOLERANCE, (name, float(wanted), float(found))
    wanted.backward()
    found.backward()
    for each in (one, model):
        for parameter in each.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    difference = differences(one, model)
    assert difference < TOLERANCE, (name, difference)
    shared = sum(not p.placements[0].is_replicate() for p in model.parameters())
    assert shared >= 4 * len(layers), (name, shared)


def all_train_as_one_process(names: list[str], degree: int) -> None:
    with initialized(tensor_parallel_degree=degree):
        for name in names:
            trains_as_one_process(name)


def latent_attention_and_experts_keep_the_collective_budget() -> None:
    """Counts the collectives of a dense layer and a layer with routed and shared experts."""
    with initialized(tensor_parallel_degree=2, tensor_parallel_checks=0):
        model = tsm.transform(family_models.tiny("deepseek_v3"))
        with Collectives() as forward:
            loss = loss_of(model, family_models.inputs(model, 0))
        with Collectives() as backward:
            loss.backward()
    assert forward.counts == {"all_reduce": 2 + 3, "all_gather_into_tensor": 1}, forward.counts
    assert backward.counts == {"all_reduce": (2 + 2) + (3 + 2) + 1}, backward.counts


def all_train_under_fsdp(rows: list[tuple[str, int, int]]) -> None:
    """(family, FSDP's version, tensor degree) in each of ``rows``, sharded over the rest of the world."""
    for name, version, degree in rows:
        with initialized(tensor_parallel_degree=degree, hybrid_shard_degree=dist.get_world_size() // degree):
            under_fsdp(name, version)


def under_fsdp(name: str, version: int) -> None:
    """In evaluation mode, as data-parallel ranks draw dropout for their own samples."""
    one = family_models.tiny(name).eval()
    before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    size = tsm.state.dp_size
    # Every data-parallel rank has other samples, and as many labels, so that the mean of losses is the batch's.
    parts = [family_models.inputs(one, step) for step in range(size)]
    losses = [one(**part).loss for part in parts]
    (sum(losses) / size).backward()
    gradients = {key: p.grad for key, p in one.named_parameters(remove_duplicate=False) if p.grad is not None}

    model = tsm.transform(family_models.tiny(name).eval())
    model = wrap1(model, False) if version == 1 else wrap2(model, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(**parts[tsm.state.dp_rank]).loss
    assert abs(loss - losses[tsm.state.dp_rank]) < TOLERANCE, (name, version, float(loss))
    loss.backward()
    optimizer.step()
    check_gradients(before, full(model), gradients)
