"""Table of all patches that `torch.sagemaker` applies to torch, with time, reason and undo function.

Two patches are made when `torch.sagemaker` is imported, since scripts bind those names before `tsm.init()`. The
others are made by `init`, each only when the configuration asks for it, and undone by `tsm.state.reset()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smddp.sagemaker import replacements
from smddp.sagemaker.fsdp import gloo_average
from smddp.sagemaker.parallel import Layout
from smddp.sagemaker.private_names import MissingNameError
from smddp.sagemaker.replacements import Undo


@dataclass(frozen=True)
class Patch:
    """One change of torch.

    Attributes:
        name: short name.
        target: what in torch behaves differently while the patch is active.
        why: what it is for.
        apply: makes the change and returns what undoes it.
        wanted: of the configuration and the layout; None for a patch made at import.
        without: takes the place of ``apply`` where torch lacks a private name that it needs.
    """

    name: str
    target: str
    why: str
    apply: Callable[[], Undo]
    wanted: Callable[[dict[str, Any], Layout], bool] | None = None
    without: Callable[[MissingNameError], Undo] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.target}: {self.why}"


PATCHES = (
    Patch(
        "post_param_init_fn",
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "takes post_param_init_fn, which scripts always pass, and calls it with each module after param_init_fn",
        replacements.post_param_init_fn,
    ),
    Patch(
        "sharded_optimizer",
        "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict",
        "it takes process_group, and cuts the state as the parameters are cut",
        replacements.sharded_optimizer,
    ),
    Patch(
        "translate_on_save",
        "FullStateDictConfig.__init__ and FullyShardedDataParallel.state_dict",
        "full state dicts come in Hugging Face names and shapes; translate_on_save=False turns that off",
        replacements.translate_on_save,
        lambda values, sizes: True,
    ),
    Patch(
        "hybrid_fsdp",
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "a call without process_group and device_mesh gets the mesh and strategy of hybrid_shard_degree",
        replacements.hybrid_fsdp,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "unsharded_frozen",
        "_catch_all_reshard of FSDP1",
        "frozen units that hybrid_shard_degree=1 does not shard are in state dicts after a backward pass, too",
        replacements.unsharded_frozen,
        lambda values, sizes: not sizes.native,
        replacements.without_fsdp1,
    ),
    Patch(
        "gloo_average",
        "torch.distributed.fsdp.fully_shard, before torch 2.9",
        "it refuses gloo on CPUs, over which these versions sum gradients instead of averaging them",
        replacements.gloo_average,
        lambda values, sizes: gloo_average.torch_sums(),
    ),
    Patch(
        "hybrid_fully_shard",
        "the default mesh of torch.distributed.fsdp.fully_shard",
        "a call without mesh gets the (replicate, shard) mesh, or the shard dimension alone for one copy",
        replacements.hybrid_fully_shard,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "idle_experts",
        "what torch.distributed.fsdp.fully_shard calls",
        "experts in a list that a rank's tokens have not chosen take part in its reductions",
        replacements.idle_experts,
        lambda values, sizes: True,
    ),
    Patch(
        "spread_experts",
        "what fully_shard calls, and FullyShardedDataParallel.__init__",
        "experts are sharded over the ranks that hold the same ones",
        replacements.spread_experts,
        lambda values, sizes: sizes.expert > 1,
    ),
    Patch(
        "fsdp1_parameters",
        "views of FlatParamHandle on parameters and gradients, and its _init_flat_param_and_metadata",
        "the optimizer keeps the tensor-parallel parameters of unsharded units, all tensor-parallel parameters "
        "accumulate gradients in no_sync(), and frozen parameters remain frozen",
        replacements.fsdp1_parameters,
        lambda values, sizes: sizes.tensor > 1,
        replacements.without_fsdp1,
    ),
    Patch(
        "fsdp2_parameters",
        "FSDPState._lazy_init of torch.distributed.fsdp.fully_shard",
        "it finds the parameters of modules that no plan names, inside forward passes of a part of the model, too",
        replacements.fsdp2_parameters,
        lambda values, sizes: sizes.tensor > 1,
        replacements.without_fully_shard,
    ),
    Patch(
        "fsdp1_grad_norm",
        "torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
        "its norm is the sum over the ranks of the tensor group, too, as torch.sagemaker.grad_norm has it",
        replacements.tensor_groups_norm,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "grad_scaler",
        "_unscale_grads_ of torch.amp.GradScaler and FSDP's ShardedGradScaler",
        "all ranks skip a step in which a gradient of one rank overflows",
        replacements.agreed_overflow,
        lambda values, sizes: not sizes.native,
        replacements.without_scaling,
    ),
    Patch(
        "adapters",
        "what a torch.nn.Module does with a module that becomes part of it (a global hook)",
        "adapters of layers that are shared already are shared as they come",
        replacements.adapters,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "clients",
        "accelerate.Accelerator (__init__, prepare, gather, reduce) and transformers.Trainer (once they are imported)",
        "a tensor group gets the same samples and counts as one process; other degrees are refused",
        replacements.client_groups,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "client_states",
        "accelerate.Accelerator.save_state and load_state, and transformers.Trainer.train (once they are imported)",
        "checkpoints that would hold one rank's part of the optimizer are refused",
        replacements.client_states,
        lambda values, sizes: sizes.tensor > 1 or sizes.expert > 1,
    ),
    Patch(
        "client_loads",
        "load_fsdp_model in accelerate.accelerator and transformers.trainer (once they are imported)",
        "fused weights that were saved at another tensor degree are refused before they are read",
        replacements.client_loads,
        lambda values, sizes: True,
    ),
    Patch(
        "no_ddp",
        "torch.nn.parallel.DistributedDataParallel.__init__",
        "it cannot take the parameters of a transformed model: say what can",
        replacements.no_distributed_data_parallel,
        lambda values, sizes: sizes.tensor > 1 or sizes.expert > 1,
    ),
    Patch(
        "fsdp1_chunks",
        "DTensorExtensions.chunk_dtensor, and optim_state_dict(_to_load) of FullyShardedDataParallel",
        "sharded state dicts are cut over the shard dimension, and loaded over the tensor dimension; those of flat "
        "parameters are made by any group; full ones have copies of each state",
        replacements.fsdp1_state,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "tensor_parts",
        "_save_state_dict and _load_state_dict of torch.distributed.checkpoint",
        "the group of one tensor rank saves and loads that rank's part, and its coordinator may be a global rank",
        replacements.tensor_rank_parts,
        lambda values, sizes: True,
        replacements.without_group_checkpoints,
    ),
    Patch(
        "older_order",
        "FullyShardedDataParallel.optim_state_dict_to_load",
        "it takes its first three arguments in the order of torch 2.0, too, as older scripts give them",
        replacements.older_order,
        lambda values, sizes: True,
    ),
    Patch(
        "optimizer_order",
        "what fully_shard calls, and every torch.optim.Optimizer step (a step hook)",
        "an optimizer with parameters that FSDP replaced, and replicas with different values, are errors",
        replacements.optimizers,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "activation_offloading",
        "OffloadWrapper.forward, of torch's offload_wrapper",
        "checkpointed layers' inputs leave for the host and come back activation_loading_horizon layers ahead",
        replacements.offload,
        lambda values, sizes: values["sm_activation_offloading"],
        replacements.without_offload,
    ),
    Patch(
        "cache_flush_warnings",
        "every torch.optim.Optimizer step (a step hook)",
        "warn when the CUDA caching allocator flushed its cache",
        replacements.cache_flushes,
        lambda values, sizes: values["fsdp_cache_flush_warnings"] and replacements.has_gpu(),
    ),
)

# In the order in which they were made.
_active: dict[str, Undo] = {}
# Patches whose private names this torch lacks.
_unavailable: set[str] = set()


def patches() -> list[Patch]:
    """The patches of torch that are active now, in the order in which they were made."""
    by_name = {patch.name: patch for patch in PATCHES}
    return [by_name[name] for name in _active if name not in _unavailable]


def _apply(patch: Patch) -> None:
    try:
        _active[patch.name] = patch.apply()
    except MissingNameError as error:
        if patch.without is None:
            raise
        _active[patch.name] = patch.without(error)
        _unavailable.add(patch.name)


def apply_import() -> None:
    """Apply the patches that scripts need before `init`. Idempotent."""
    for patch in PATCHES:
        if patch.wanted is None and patch.name not in _active:
            _apply(patch)


def apply_init(values: dict[str, Any], sizes: Layout) -> None:
    """Apply the patches that this configuration requires."""
    for patch in PATCHES:
        if patch.wanted is not None and patch.name not in _active and patch.wanted(values, sizes):
            _apply(patch)


def undo_init() -> None:
    """Undo the patches of `apply_init` in reverse order."""
    at_init = {patch.name for patch in PATCHES if patch.wanted is not None}
    for name in [name for name in reversed(_active) if name in at_init]:
        _active.pop(name)()
        _unavailable.discard(name)


def undo_all() -> None:
    """Undo every patch, including those of the import; `apply_import` applies the latter again."""
    undo_init()
    for name in list(reversed(_active)):
        _active.pop(name)()
