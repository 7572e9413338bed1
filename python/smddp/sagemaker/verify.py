"""`tsm.verify()`: compares a transformed model with the whole model on tiny inputs: outputs and gradients.

A plan that cuts a block wrongly may still run, and even give the right outputs: where a module inside a region is used
in part by every rank and nothing sums its gradients, only they are wrong. So both are compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker import hf
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel.mixins import original
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from smddp.sagemaker.tensor_parallel.transformer import TransformerLMHead

# Of the largest value there is: what float32 may lose by adding up in another order, many times over.
TOLERANCE = 1e-4
_SEED = 4321


def verify(model: nn.Module, inputs: Any = None, config: Mapping[str, Any] | None = None) -> float:
    """Compare ``model``, shared among the ranks of its tensor group, with the whole model in one process.

    Collective over the tensor group. Before `transform`, two copies in float32 are made of the model, with values of
    their own, so that no weight is zero or one; one of them is transformed. After it, the whole model is made anew
    from its configuration and gets the shared one's values. Either way every rank holds the whole model and its
    gradients for a moment: take a small configuration of the same family, with the heads and degrees of the large one.

        >>> tsm.verify(AutoModelForCausalLM.from_config(small))

    Args:
        model: a module on a real device, before FSDP; in float32 if it is transformed already.
        inputs: a dict of the forward's keyword arguments, a tuple of its arguments, or one tensor; equal on all ranks.
            By default token ids or pixels by the configuration of a transformers model.
        config: as `transform` takes it; only for a model that is not transformed yet.

    Returns:
        The largest difference, as a part of the largest value; 0 with tensor_parallel_degree 1.

    Raises:
        ValueError: outputs or gradients differ, naming the module, the degree, the difference and what to try; a model
            on meta, under FSDP or of another dtype; inputs that cannot be made; and all that `transform` raises.
        RuntimeError: before `tsm.init()`.
    """
    if state.mesh is None:
        raise RuntimeError("verify() needs the mesh that tsm.init() makes: call tsm.init() first")
    if state.tp_size == 1:
        return 0.0
    arguments = _arguments(model, inputs)
    whole, shared = _both(model, config)
    outputs, gradients = _run(whole, arguments)
    try:
        found, of_shared = _run(shared, arguments)
        of_shared = translate_state_dict_to_hf(shared, of_shared)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise ValueError(f"{_subject(whole)} fails where the whole model runs: {error}. {_ADVICE}") from error
    differences = [*_differences("output ", outputs, found), *_differences("the gradient of ", gradients, of_shared)]
    worst, text = max(differences, default=(0.0, ""))
    of_all: list[Any] = [None] * state.tp_size
    dist.all_gather_object(of_all, (worst, text), group=state.tp_process_group)
    worst, text = max(of_all)
    if worst > TOLERANCE:
        first = _first_module(whole, shared, arguments)
        raise ValueError(f"{_subject(whole)} is not the whole model: {text}{first}. {_ADVICE}")
    return worst


_ADVICE = (
    "The plan cuts this module, or another in its block, wrongly. Fused projections: [q | k | v] takes "
    "packed_qkv_colwise, heads one after another, each with its q, k and v, interleaved_qkv_colwise, [gate | up] "
    "packed_colwise. What has parameters between a colwise and a rowwise module, and is not cut itself, takes "
    'replicated_with_grad_allreduce. Or leave the block whole: "replicate" for all its modules'
)


def _subject(model: nn.Module) -> str:
    return f"{type(model).__name__} with tensor_parallel_degree={state.tp_size}"


def _both(model: nn.Module, config: Mapping[str, Any] | None) -> tuple[nn.Module, nn.Module]:
    """Returns the whole and the shared model with equal values."""
    from smddp.sagemaker.transform import transform

    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("verify() computes, and this model is on meta: give it real parameters")
    if not isinstance(model, TransformerLMHead):
        whole = copy.deepcopy(model).float()
        _perturb_parameters(whole)
        return whole, transform(copy.deepcopy(whole), config=config)
    if config is not None:
        raise ValueError("verify(): this model is transformed already with another config: omit config")
    if not hf.is_pretrained(model) or not all(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"verify() cannot make the whole of this {type(model).__name__}: it is under FSDP or no transformers "
            "model; call verify(model, inputs, config) with the model as it is before transform()"
        )
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError("verify() compares in float32: give it the model before transform(), it copies it so")
    whole = original(type(model))(copy.deepcopy(model.config)).to(next(model.parameters()).device)
    values = {name: _full(parameter.detach()) for name, parameter in model.named_parameters(remove_duplicate=False)}
    whole.load_state_dict(translate_state_dict_to_hf(model, values), strict=False)
    return whole, model


def _perturb_parameters(model: nn.Module) -> None:
    """Give all parameters distinct values: constant parameters would hide sharding errors."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def _arguments(model: nn.Module, inputs: Any) -> tuple[tuple, dict[str, Any]]:
    if inputs is None:
        inputs = hf.tiny_inputs(model, _SEED)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Sequence):
        return tuple(inputs), {}
    raise TypeError(f"verify(): inputs must be a dict, a tuple or a tensor, got {type(inputs).__name__}")


def _run(model: nn.Module, arguments: tuple[tuple, dict]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(outputs by place, gradients by parameter's name) of one forward and backward without dropout."""
    args, kwargs = arguments
    with _evaluating(model):
        outputs = dict(_tensors(model(*args, **kwargs)))
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(_objective(outputs), list(parameters.values()), allow_unused=True)
    gradients = {
        name: _full(torch.zeros_like(parameter) if gradient is None else gradient)
        for (name, parameter), gradient in zip(parameters.items(), found)
    }
    return {name: tensor.detach() for name, tensor in outputs.items()}, gradients


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Temporarily sets ``model`` to evaluation mode, and restores the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _objective(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the loss, if any; else a weighted sum of all outputs with different weights."""
    if "loss" in outputs:
        return outputs["loss"]
    generator = torch.Generator().manual_seed(_SEED)
    total = torch.zeros(())
    for tensor in outputs.values():
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            total = total.to(tensor.device) + (tensor * weights).sum() / max(1, tensor.numel()) ** 0.5
    if not total.requires_grad:
        raise ValueError("verify(): no output of the model depends on its parameters")
    return total


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, floating-point tensor) of everything in ``output``."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield name or "0", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for i, value in enumerate(output):
            yield from _tensors(value, f"{name}.{i}" if name else str(i))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _differences(
    what: str, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> Iterator[tuple[float, str]]:
    """(difference as a part of the largest value, text) of each tensor in ``wanted``."""
    # Some gradients, such as a key bias's, are zero except for rounding, so also compare with the largest gradient.
    overall = max((float(tensor.abs().max()) for tensor in wanted.values() if tensor.numel()), default=0.0)
    for name, tensor in wanted.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            shape = "missing" if other is None else f"of shape {tuple(other.shape)}"
            yield float("inf"), f"{what}{name} is {shape}, whole {tuple(tensor.shape)}"
        elif tensor.numel():
            gap, largest = float((tensor - other).abs().max()), float(tensor.abs().max())
            part = gap / (largest + 1e-2 * overall + 1e-12)
            part = part if part == part else float("inf")
            yield part, f"{what}{plain_name(name)} differs by {gap:.3g} where its largest value is {largest:.3g}"


def _first_module(whole: nn.Module, shared: nn.Module, arguments: tuple[tuple, dict]) -> str:
    """Describes the first module whose outputs have equal shapes in both models and differ; "" if none."""
    theirs = _outputs_of_modules(shared, arguments)
    for name, tensor in _outputs_of_modules(whole, arguments).items():
        other = theirs.get(name)
        if other is None or other.shape != tensor.shape:
            continue  # inside a region, where each rank has its part
        gap = (tensor - other).abs().max()
        if gap > TOLERANCE * tensor.abs().max():
            return f"; the first module whose output differs is {name or 'the model itself'}, by {float(gap):.3g}"
    return "; the outputs of all modules agree"


def _outputs_of_modules(model: nn.Module, arguments: tuple[tuple, dict]) -> dict[str, torch.Tensor]:
    """Records the first output tensor of each module in a forward pass, in completion order."""
    outputs: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            for _name, tensor in _tensors(output):
                outputs.setdefault(name, tensor.detach().clone())
                break

        handles.append(module.register_forward_hook(keep))
    try:
        with torch.no_grad(), _evaluating(model):
            model(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    return outputs
