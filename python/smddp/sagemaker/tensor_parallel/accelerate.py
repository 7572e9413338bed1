"""Accelerate and transformers' Trainer with tensor parallelism: a tensor group counts as one data-parallel process.

The ranks of a tensor group get the same samples. So losses, counts of tokens and metrics must be taken once for each
group, not once for each rank. The functions here replace those of Accelerate and Trainer while tensor_parallel_degree
is above 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from smddp.sagemaker.distributed.checkpoint import hf
from smddp.sagemaker.fsdp.full_state import translate_full_state_dict
from smddp.sagemaker.private_names import ITEMS_IN_BATCH, MODELS, PREPARE_ONE, PREPARE_TP, SAVE_REST
from smddp.sagemaker.state_handler import state


def is_shared(module: Any) -> bool:
    """Return whether ``module`` is a model that `transform` has shared among the ranks of a tensor group."""
    if not isinstance(module, nn.Module) or state.mesh is None:
        return False
    first = next(module.parameters(), None)
    return isinstance(first, DTensor) and "tensor" in (first.device_mesh.mesh_dim_names or ())


def of_accelerate(module: Any) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) of what is replaced in ``module``, which is `accelerate.accelerator`."""
    kind, apply = module.Accelerator, module.recursively_apply
    PREPARE_ONE.of(kind)
    return [
        (kind, "__init__", init(kind.__init__, module.ParallelismConfig)),
        (kind, "prepare", prepare(kind.prepare)),
        (kind, "_prepare_tp", prepare_tp(PREPARE_TP.of(kind))),
        (kind, "gather", gather(kind.gather, apply)),
        (kind, "reduce", reduce(kind.reduce, apply)),
        (module, "gather_object", gather_object(module.gather_object)),
        (module, "get_model_tp_size", model_tp_size(module.get_model_tp_size)),
    ]


def of_trainer(module: Any) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) of what is replaced in ``module``, which is `transformers.trainer`."""
    kind = module.Trainer
    SAVE_REST.of(kind)
    # transformers 5 multiplies the loss by the number of tensor groups, 4.57 by that of ranks.
    copies = 1 if "get_tp_size" in kind.compute_loss.__code__.co_names else state.tp_size
    return [
        (kind, "_get_num_items_in_batch", num_items(ITEMS_IN_BATCH.of(kind), copies)),
        (kind, "get_tp_size", tp_size(kind.get_tp_size)),
        (kind, "save_model", save_model(kind.save_model)),
    ]


def states_of_accelerate(module: Any) -> list[tuple[Any, str, Any]]:
    """As `of_accelerate`: methods that read or write an optimizer's checkpoint."""
    kind = module.Accelerator
    return [(kind, name, refuse_states(getattr(kind, name))) for name in ("save_state", "load_state")]


def states_of_trainer(module: Any) -> list[tuple[Any, str, Any]]:
    """As `of_trainer`: the method that trains and writes checkpoints."""
    return [(module.Trainer, "train", train(module.Trainer.train))]


def loads(module: Any) -> list[tuple[Any, str, Any]]:
    """As `of_accelerate` and `of_trainer`: the function by which both load a model's checkpoint."""
    return [(module, "load_fsdp_model", refuse_other_forms(module.load_fsdp_model))]


def init(original: Callable[..., None], config: type) -> Callable[..., None]:
    """`Accelerator.__init__` with a ``config`` (`ParallelismConfig`) of the degrees of `tsm.init()` by default."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        by_environment = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
        names = ("parallelism_config", "torch_tp_plugin", "deepspeed_plugin", "deepspeed_plugins")
        if not by_environment and not any(bound.arguments.get(name) for name in names):
            bound.arguments["parallelism_config"] = config(**_degrees())
        with _second_fsdp():
            original(*bound.args, **bound.kwargs)
        _check(self.parallelism_config)

    return __init__


def _degrees() -> dict[str, int]:
    """The arguments of `ParallelismConfig` for the mesh of `tsm.state`. Raises ValueError if it cannot express it."""
    mesh = state.mesh
    assert mesh is not None  # `init` has made it
    replicate, shard, tensor = mesh.shape
    if replicate > 1 and shard == 1:
        raise ValueError(
            f"Accelerate with tensor_parallel_degree={tensor} has no form for {replicate} copies that are not sharded: "
            f"set hybrid_shard_degree to a divisor of {replicate} above 1, or to {replicate}"
        )
    return {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tensor}


@contextlib.contextmanager
def _second_fsdp() -> Iterator[None]:
    """FSDP2 as the default of Accelerate's FSDP plugin, since FSDP1 takes no `ParallelismConfig`."""
    given = "FSDP_VERSION" in os.environ
    os.environ.setdefault("FSDP_VERSION", "2")
    try:
        yield
    finally:
        if not given:
            del os.environ["FSDP_VERSION"]


def _check(config: Any) -> None:
    """Raise ValueError if ``config``, an Accelerator's, is not that of `tsm.state`."""
    assert state.mesh is not None  # `init` has made it
    found = None if config is None else {name: getattr(config, name) for name in (*_degrees(), "cp_size", "sp_size")}
    wanted = {**_degrees(), "cp_size": 1, "sp_size": 1}
    if found != wanted:
        shown = "no ParallelismConfig" if found is None else f"ParallelismConfig({_arguments(found)})"
        raise ValueError(
            f"this Accelerator has {shown}, and tsm.init() has tensor_parallel_degree={state.tp_size}: its ranks would "
            f"train on other samples. Make the Accelerator or Trainer after tsm.init() without one, or with "
            f"ParallelismConfig({_arguments(_degrees())})"
        )
    if not torch.equal(state.mesh.mesh.flatten(), torch.arange(state.mesh.size())):
        raise ValueError(
            "Accelerate numbers tensor groups by rank, and the ranks of this job's nodes take turns, so tsm.init() has "
            f"other groups: {state.mesh.mesh.tolist()}. Start all ranks of a node with consecutive numbers"
        )


def _arguments(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.prepare` that raises ValueError if a shared model comes with other degrees than its own."""

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_shared, args)):
            _check(self.parallelism_config)
        return original(self, *args, **kwargs)

    return checked


def prepare_tp(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator._prepare_tp` that leaves shared models alone; the original imports what transformers 5 lacks."""

    @functools.wraps(original)
    def _prepare_tp(self: Any, *args: Any) -> Any:
        if not any(map(is_shared, args)):
            return original(self, *args)
        first = [each if isinstance(each, nn.Module) else self._prepare_one(each, first_pass=True) for each in args]
        return [each if isinstance(each, nn.Module) else self._prepare_one(each) for each in first]

    return _prepare_tp


def refuse_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.save_state` or `load_state` that refuses what `_unsaved_part` finds, before any file is touched."""

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = _unsaved_part(self, MODELS.of(self))
        if part is not None:
            raise ValueError(
                f"Accelerator.{original.__name__} {part}. Use save() and load() of "
                "torch.sagemaker.distributed.checkpoint, or let FSDP shard the model with FSDP2 (hybrid_shard_degree "
                "above 1 and an fsdp_plugin)"
            )
        return original(self, *args, **kwargs)

    return checked


def _unsaved_part(accelerator: Any, models: list[Any]) -> str | None:
    """The reason why Accelerate's checkpoint would hold a part of the optimizer, or None."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None and any(map(is_shared, models)):
        return (
            f"with tensor_parallel_degree={state.tp_size} and without FSDP would save one rank's part of the optimizer"
        )
    if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1 and state.ep_size > 1:
        return f"with expert_parallel_degree={state.ep_size} and FSDP1 would save one rank's part of the optimizer"
    return None


def refuse_other_forms(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accelerate's `load_fsdp_model` that raises ValueError for fused weights of another tensor degree. Collective."""

    @functools.wraps(original)
    def load_fsdp_model(
        plugin: Any, accelerator: Any, model: nn.Module, input_dir: Any, *args: Any, **more: Any
    ) -> Any:
        if plugin.fsdp_version == 2:
            index = args[0] if args else more.get("model_index", 0)
            # One rank may have the only whole checkpoint.
            found = [_other_form(model, Path(input_dir), index) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(found)
            if found[0] is not None:
                raise ValueError(
                    f"checkpoint {input_dir}: {found[0]} at tensor_parallel_degree={state.tp_size}: Accelerate stores "
                    "fused weights in the form of one tensor degree. Resume at the degree of the checkpoint, or use "
                    "save() and load() of torch.sagemaker.distributed.checkpoint"
                )
        return original(plugin, accelerator, model, input_dir, *args, **more)

    return load_fsdp_model


def _other_form(model: nn.Module, folder: Path, index: int) -> str | None:
    """The first parameter with another number of dimensions in the checkpoint, sharded or whole, in ``folder``."""
    parts = folder if folder.name == f"pytorch_model_fsdp_{index}" else folder / f"pytorch_model_fsdp_{index}"
    whole = folder / f"pytorch_model_fsdp{f'_{index}' if index else ''}.bin"
    if (parts / ".metadata").exists():
        saved = FileSystemReader(parts).read_metadata().state_dict_metadata
        sizes = {name.removeprefix("model."): getattr(each, "size", None) for name, each in saved.items()}
    elif whole.exists():
        values = torch.load(whole, map_location="meta", weights_only=True, mmap=True)
        sizes = {name: getattr(value, "shape", None) for name, value in values.items()}
    else:
        return None
    for name, parameter in model.named_parameters():
        size = sizes.get(name)
        if size is not None and len(size) != parameter.dim():
            return f"{name} was saved with shape {tuple(size)} and has {tuple(parameter.shape)}"
    return None


def model_tp_size(original: Callable[[nn.Module], int | None]) -> Callable[[nn.Module], int | None]:
    """Accelerate's `get_model_tp_size`, for shared models, too."""

    @functools.wraps(original)
    def get_model_tp_size(model: nn.Module) -> int | None:
        return state.tp_size if is_shared(model) else original(model)

    return get_model_tp_size


def _data_ranks() -> list[int]:
    """The ranks of the world with this one's place in their tensor groups, in the order of their samples."""
    assert state.mesh is not None  # `init` has made it
    ranks: list[int] = state.mesh.mesh[..., state.tp_rank].flatten().tolist()
    return ranks


def gather(original: Callable[..., Any], apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.gather` with one part for each tensor group. ``apply``: Accelerate's `recursively_apply`."""

    def of_groups(tensor: torch.Tensor) -> torch.Tensor:
        assert state.mesh is not None  # `init` has made it
        return tensor.unflatten(0, (state.mesh.size(), -1))[_data_ranks()].flatten(0, 1)

    @functools.wraps(original)
    def gathered(self: Any, tensor: Any) -> Any:
        return apply(of_groups, original(self, tensor), error_on_other_type=True)

    return gathered


def gather_object(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Accelerate's `gather_object`, of lists, with the objects of one rank of each tensor group."""

    @functools.wraps(original)
    def gathered(objects: Any) -> list[Any]:
        of_all = original([objects])
        return [each for rank in _data_ranks() for each in of_all[rank]]

    return gathered


def reduce(original: Callable[..., Any], apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.reduce` whose sums count each tensor group once. ``apply``: Accelerate's `recursively_apply`."""

    def of_groups(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / state.tp_size if tensor.is_floating_point() else tensor // state.tp_size

    @functools.wraps(original)
    def reduced(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        found = original(self, tensor, reduction, scale)
        return apply(of_groups, found, error_on_other_type=True) if reduction == "sum" else found

    return reduced


def num_items(original: Callable[..., Any], copies: int) -> Callable[..., Any]:
    """`Trainer._get_num_items_in_batch` that counts the tokens of each tensor group once.

    Args:
        copies: ranks that `Trainer.compute_loss` counts for each tensor group when it multiplies the loss.
    """

    @functools.wraps(original)
    def _get_num_items_in_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _without_degree(self):
            count = original(self, *args, **kwargs)
        return count * copies if count is not None and self.args.average_tokens_across_devices else count

    return _get_num_items_in_batch


@contextlib.contextmanager
def _without_degree(trainer: Any) -> Iterator[None]:
    """Hide the tensor degree from ``trainer``, which would divide counts by it that `gather` has taken once."""
    shared = trainer.accelerator.state
    config, shared.parallelism_config = shared.parallelism_config, None
    trainer.get_tp_size = lambda: 1
    try:
        yield
    finally:
        shared.parallelism_config = config
        del trainer.get_tp_size


def tp_size(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """`Trainer.get_tp_size` of a shared model."""

    @functools.wraps(original)
    def get_tp_size(self: Any) -> int:
        return state.tp_size if is_shared(self.model) else original(self)

    return get_tp_size


def train(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train` that refuses checkpoints of which one rank would write its part of the optimizer."""

    @functools.wraps(original)
    def checked(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        saves = getattr(self.args.save_strategy, "value", self.args.save_strategy) != "no"
        part = _unsaved_part(self.accelerator, [self.model])
        if part is not None and (resume_from_checkpoint or (saves and not self.args.save_only_model)):
            raise ValueError(
                f"Trainer checkpoints: Trainer {part}, and load it on all ranks. Set save_strategy='no' or "
                "save_only_model=True and start without resume_from_checkpoint, or let FSDP shard the model "
                "(hybrid_shard_degree above 1, fsdp='full_shard' and FSDP2)"
            )
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return checked


def save_model(original: Callable[..., None]) -> Callable[..., None]:
    """`Trainer.save_model` that writes the whole of a shared model that FSDP does not hold. Collective.

    The other files are those of Trainer: tokenizer, arguments, and the push to the Hub.
    """

    @functools.wraps(original)
    def saved(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _without_fsdp(self):
            return original(self, output_dir, _internal_call)
        directory = output_dir or self.args.output_dir
        values = None
        if hasattr(self.model, "peft_type"):  # PEFT selects the adapters' values
            values = translate_full_state_dict(self.model, self.model.state_dict(), rank0_only=True)
        else:
            hf.save_pretrained(self.model, directory)
        if self.args.should_save:
            with _unsaved(self.model) if values is None else contextlib.nullcontext():
                self._save(directory, values)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    return saved


@contextlib.contextmanager
def _unsaved(model: Any) -> Iterator[None]:
    """Let `Trainer._save` write every file but those of ``model``."""
    model.save_pretrained = lambda *_, **__: None
    try:
        yield
    finally:
        del model.save_pretrained


def _without_fsdp(trainer: Any) -> bool:
    return is_shared(trainer.model) and not trainer.is_fsdp_enabled
