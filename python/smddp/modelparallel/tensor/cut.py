"""The layers of a model shared over the tensor group, when `DistributedModel` wraps it.

The translator of torch.sagemaker creates DTensors. A pipeline sums, averages, saves and drops plain tensors, so each
rank then replaces them by plain parameters with its parts, which record their split.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smddp.modelparallel.ranks import Ranks
from smddp.modelparallel.tensor import registry
from smddp.modelparallel.tensor.choose import Chosen
from smddp.modelparallel.tensor.marks import any_marked, options_of
from smddp.modelparallel.tensor.split import REPLACED, SPLIT, Split
from smddp.sagemaker.tensor_parallel import share as sharing
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.shards import RELAID, put

log = logging.getLogger("smddp.modelparallel")

# Options that select kernels or initialization methods: they do not change results.
KERNELS = frozenset(
    """fused_softmax fused_dropout fused_bias_gelu flash_attention triton_flash_attention zero_init optimize
    distribute_embedding weight_initialization mask_padding""".split()
)
# Of random numbers inside shared layers, which differ from rank to rank.
_SEED = 12345


def share(model: nn.Module, ranks: Ranks) -> None:
    """Share the marked modules of ``model``, whose values are the same on all ranks. No communication."""
    if not any_marked(model):
        log.warning(
            "smp.DistributedModel(): 'tensor_parallel_degree' is %d and nothing is shared: make the model under "
            "smp.tensor_parallelism(), or call smp.set_tensor_parallelism(model)",
            ranks.tp_size,
        )
        return
    _log_unused_options(model)
    device = next((q.device.type for q in model.parameters()), "cpu")
    tp = TensorGroup(DeviceMesh.from_group(ranks.tp_group, device))
    chosen = Chosen(model, tp, _SEED)
    before = dict(model.named_parameters(remove_duplicate=False))
    sharing.cut(model, tp, chosen.planner, chosen.styles, chosen.one)
    _unwrap(model, tp, before)


def _log_unused_options(model: nn.Module) -> None:
    """Log unused options of `tensor_parallelism`, except kernel options, which do not change results."""
    given = {name for module in model.modules() for name, value in options_of(module).items() if value}
    odd = sorted(given - KERNELS - registry.taken())
    if odd:
        log.warning(
            "smp.tensor_parallelism(): %s has no effect here: modules compute what they compute in one process",
            ", ".join(odd),
        )


def _unwrap(model: nn.Module, tp: TensorGroup, before: dict[str, nn.Parameter]) -> None:
    """Replace each DTensor by a plain parameter, and map parameters that scripts may hold to these."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            old = before.get(f"{prefix}.{name}" if prefix else name)
            if not isinstance(parameter, DTensor):
                if parameter is not None and old is not None and parameter is not old:
                    old.__dict__[REPLACED] = parameter
                continue
            if id(parameter) not in made:
                assert old is not None  # as plans that add parameters are left out
                placement = next(each for each in parameter.placements if each.is_shard())
                split = Split(tp.size, tp.rank, placement.dim, tuple(parameter.shape), tuple(old.shape))  # type: ignore[attr-defined]
                put(module, name, parameter.to_local().detach(), parameter)  # type: ignore[arg-type]
                made[id(parameter)] = module._parameters[name]  # type: ignore[assignment]
                made[id(parameter)].__dict__[SPLIT] = split
            module._parameters[name] = made[id(parameter)]
            if old is not None:
                old.__dict__[REPLACED] = made[id(parameter)]
    for module in model.modules():
        module.__dict__.pop(RELAID, None)
