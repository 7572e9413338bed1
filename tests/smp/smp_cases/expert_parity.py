"""One combination of experts' degrees and options against one process: losses, and every parameter's gradient."""

import functools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases.expert_models import LENGTH, moe_config, one_process, tiny_moe
from smp_cases.models import batch, loss_of, part_of
from smp_cases.parity import TOLERANCE, check_gradients, full, wrap1, wrap2
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor

AUX, Z = 0.05, 0.01


def train_all(rows: list[dict]) -> None:
    """Trains every combination in ``rows`` and names the first failure."""
    for row in rows:
        try:
            train_as_one_process(**row)
        except Exception as error:
            raise AssertionError(f"in the combination {row}") from error


def train_as_one_process(
    family: str = "mixtral",
    expert: int = 2,
    tensor: int = 1,
    shard: int = 0,
    fsdp: int = 2,
    balancing: str = "none",
    dispatcher: str = "all_to_all",
    checkpointing: bool = False,
    context: int = 1,
    comm: str = "p2p",
    **overrides: int,
) -> None:
    """Compares two steps; the parameters after the first step verify its gradients."""
    aux, z = (AUX, Z) if balancing == "aux_loss" else (0.0, 0.0)
    if balancing in ("sinkhorn", "balanced"):
        tsm.init({})
        try:
            wanted = one_process(family, balancing, aux, z, **overrides)
        finally:
            tsm.state.reset()
    else:
        wanted = one_process(family, balancing, aux, z, **overrides)
    tsm.init(
        {
            "expert_parallel_degree": expert,
            "tensor_parallel_degree": tensor,
            "context_parallel_degree": context,
            "hybrid_shard_degree": shard,
            "random_seed": 7,
        }
    )
    try:
        config = moe_config(
            moe_load_balancing=balancing,
            moe_aux_loss_coeff=aux,
            moe_z_loss_coeff=z,
            moe_all_to_all_dispatcher=dispatcher != "all_gather",
            global_token_shuffle=dispatcher == "shuffled",
        )
        model = tsm.transform(tiny_moe(family, **overrides), config=config, cp_comm_type=comm)
        model = wrap1(model, False) if fsdp == 1 else wrap2(model, False)
        if checkpointing:
            _checkpoint(model)
        compare(model, *wanted)
    finally:
        tsm.state.reset()


def _checkpoint(model: torch.nn.Module) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, TransformerLayer),
    )


def _descend(model: torch.nn.Module) -> None:
    """SGD with rate 1, on local tensors: DTensor plans its first operation on a mesh of four dimensions for seconds."""
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(parameter, DTensor):
                assert gradient.placements == parameter.placements, (gradient.placements, parameter.placements)
                parameter, gradient = parameter.to_local(), gradient.to_local()
            parameter.sub_(gradient)


def compare(model: torch.nn.Module, losses: list[float], before: dict, gradients: dict) -> None:
    found = []
    for step in range(2):
        mine = part_of(batch(step, LENGTH), tsm.state.dp_rank, tsm.state.dp_size)
        loss = loss_of(model, get_batch_for_cp_rank(mine))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
        if step == 0:
            loss.backward()
            _descend(model)
            after = full(model)
    check_gradients(before, after, gradients)
    assert all(abs(a - b) < TOLERANCE for a, b in zip(found, losses)), (found, losses)
