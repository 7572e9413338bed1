"""Loss scaling over every mix of degrees: all ranks skip the steps that one process skips, and train as it does."""

import functools
import itertools
from collections.abc import Iterable

import combinations
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smp_cases.expert_models import moe_config, tiny_moe
from smp_cases.expert_parallel import initialized
from smp_cases.models import batch, loss_of, part_of
from smp_cases.parity import full, wrap1, wrap2
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

ENGINES = {"none": lambda model, _: model, "fsdp1": wrap1, "fsdp2": wrap2}
DIMENSIONS = {
    "shard": [1, 2, 4],
    "tensor": [1, 2, 4],
    "expert": [1, 2, 4],
    "engine": ["none", "fsdp1", "fsdp2"],
}
SCALERS = (torch.amp.GradScaler, ShardedGradScaler)
SCALE = 8.0


def _possible(row: dict) -> bool:
    if row["tensor"] * max(row["shard"], row["expert"]) > 4:
        return False
    # Without FSDP nothing averages gradients over data-parallel ranks.
    return row["engine"] != "none" or row["tensor"] == 4


def _adam(model: torch.nn.Module, **options) -> torch.optim.Optimizer:
    """With an epsilon that keeps the rounding of small gradients small."""
    return torch.optim.Adam(model.parameters(), lr=1.0, eps=1.0, **options)


@functools.cache
def _one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the scale after each of three steps, the values at the end); the first two steps overflow."""
    model = tiny_moe("mixtral", num_hidden_layers=1)
    optimizer, scaler = _adam(model), torch.amp.GradScaler("cpu", init_scale=SCALE)
    scales = []
    for step in range(3):
        scaler.scale(loss_of(model, batch(0))).backward()
        if step < 2:
            next(model.parameters()).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


def _overflow(model: torch.nn.Module, experts: bool) -> None:
    """Makes this rank's part of one gradient infinite, of the experts or of another layer."""
    for name, parameter in model.named_parameters():
        if (".experts." in name) == experts and parameter.grad is not None:
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if gradient.numel():
                gradient.view(-1)[0] = float("inf")
                return


def _train(kind: type[torch.amp.GradScaler], shard: int, tensor: int, expert: int, engine: str) -> None:
    wanted_scales, wanted = _one_process()
    with initialized(expert, tensor, shard):
        model = ENGINES[engine](tsm.transform(tiny_moe("mixtral", num_hidden_layers=1), config=moe_config()), False)
        # torch's fused kernels take no DTensors beside plain tensors, which FSDP1 has.
        # The default group of torch's class is the world of its first import.
        options = {"process_group": dist.group.WORLD} if kind is ShardedGradScaler else {}
        optimizer, scaling = _adam(model, fused=engine == "fsdp2"), kind("cpu", init_scale=SCALE, **options)
        scales = []
        for step in range(3):
            loss = loss_of(model, part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size))
            scaling.scale(loss).backward()
            # The last rank holds experts that other ranks do not hold, the second rank a shard of the rest.
            if step < 2 and dist.get_rank() == (3, 1)[step]:
                _overflow(model, experts=step == 0)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
            scales.append(scaling.get_scale())
        of_all = [None] * 4
        dist.all_gather_object(of_all, scales)
        assert of_all == [wanted_scales] * 4, (of_all, wanted_scales)
        for name, value in full(model).items():
            gap = (value - wanted[name]).abs().max()
            assert gap < 1e-5, (name, float(gap))


def _train_all(rows: list[dict], kinds: Iterable[type[torch.amp.GradScaler]]) -> None:
    for kind, row in zip(kinds, rows):
        try:
            _train(kind, **row)
        except Exception as error:
            raise AssertionError(f"with {kind.__name__} in the combination {row}") from error


def case_an_overflow_on_one_rank_skips_the_step_on_all_ranks():
    """In combinations that hold every pair of degrees and engine; the scalers take turns."""
    _train_all(combinations.choose(combinations.product(DIMENSIONS, _possible)), itertools.cycle(SCALERS))


def every_combination() -> None:
    """The full product, for the slow suite."""
    for kind in SCALERS:
        _train_all(combinations.product(DIMENSIONS, _possible), itertools.repeat(kind))
