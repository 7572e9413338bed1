"""Context-parallel forward pass of a transformers model: attention, positions and loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.sagemaker import hf
from smddp.sagemaker.context_parallel import masks
from smddp.sagemaker.context_parallel.attention import COMM_TYPES, implementation
from smddp.sagemaker.context_parallel.inputs import Inputs, exchange
from smddp.sagemaker.private_names import ATTENTION, CAN_SET_ATTENTION, SUPPORTS_BACKEND
from smddp.sagemaker.state_handler import state

# Kinds of layers that transformers' configurations name, and that attend through its registry.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
# Rotary frequencies of these kinds depend on the length of the sequence, which a rank does not see.
_BY_LENGTH = ("dynamic", "longrope")


def check(model: nn.Module, comm_type: str) -> None:
    """Raises ValueError for a model that does not support context parallelism. Changes nothing."""
    if comm_type not in COMM_TYPES:
        raise ValueError(f"cp_comm_type={comm_type!r}: must be one of {', '.join(map(repr, COMM_TYPES))}")
    if state.cp_size == 1:
        return
    name = type(model).__name__
    instead = "set context_parallel_degree=1 for this model"
    if not hf.is_pretrained(model):
        raise ValueError(f"{name}: context parallelism splits the attention of transformers models only; {instead}")
    config: Any = model.config
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has more than one sequence (towers, or an encoder); {instead}")
    arguments = inspect.signature(model.forward).parameters
    if "position_ids" not in arguments or "attention_mask" not in arguments:
        raise ValueError(f"{name}: its forward takes no position_ids or attention_mask; {instead}")
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise ValueError(f"{name}: its loss ({model.loss_type}) is not one for each next token; {instead}")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENDING
    if others:
        raise ValueError(f"{name} has unsupported non-attention layers: {', '.join(sorted(others))}; {instead}")
    if not _by_registry(type(model)):
        raise ValueError(
            f"{name} does not take its attention from transformers' registry (ALL_ATTENTION_FUNCTIONS), where "
            f"context parallelism's is; {instead}"
        )


def _by_registry(kind: Any) -> bool:
    """Returns True if the class supports a selectable attention, by the rule of `set_attn_implementation`."""
    return bool(getattr(kind, SUPPORTS_BACKEND.attribute, False)) or bool(CAN_SET_ATTENTION.of(kind)())


def split(model: Any, comm_type: str) -> None:
    """Make the checked ``model`` accept this rank's part of each sequence; no effect at a degree of 1."""
    if state.cp_size == 1:
        return
    name = implementation(comm_type)
    model.set_attn_implementation(name)
    chosen = ATTENTION.of(model.config)
    if chosen != name:
        raise ValueError(
            f"{type(model).__name__} keeps its attention implementation {chosen!r}; set "
            "context_parallel_degree=1 for this model"
        )
    parts = _Parts(inspect.signature(model.forward), model.loss_function)
    model.loss_function = parts.loss
    model.register_forward_pre_hook(parts.before, with_kwargs=True)
    model.register_forward_hook(parts.after, with_kwargs=True, always_call=True)


def is_split(module: nn.Module) -> bool:
    """Returns True if ``module`` was made by `split`."""
    return any(isinstance(getattr(hook, "__self__", None), _Parts) for hook in module._forward_pre_hooks.values())


@dataclass(eq=False)
class _Pass(masks.Pass):
    """One forward pass of a model.

    Attributes:
        inputs: this rank's part of the batch.
        loss_called: set once the model has called its loss function.
    """

    inputs: Inputs = field(kw_only=True)
    loss_called: bool = False


class _Parts:
    """Context-parallel forward passes of one model."""

    def __init__(self, signature: inspect.Signature, loss: Callable[..., torch.Tensor]) -> None:
        self._signature = signature
        self._loss = loss

    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Set the positions of this rank's tokens; later masks cover the whole batch."""
        group = state.cp_process_group
        if group is None:
            raise RuntimeError(
                f"{type(model).__name__} was split along the sequence by a tsm.init() that tsm.state.reset() has undone"
            )
        names = list(self._signature.parameters)[: len(args)]
        given = {**dict(zip(names, args)), **kwargs}
        inputs = exchange(given, group)
        _check_rotary(model, inputs.tokens.length)
        masks.enter(_Pass(self, inputs.tokens, inputs=inputs))
        # The mask stops transformers from inferring packed sequences from this rank's non-contiguous positions.
        given.update(position_ids=inputs.positions, attention_mask=inputs.padding, use_cache=False)
        return (), given

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **others: Any) -> torch.Tensor:
        """Loss function of the model: this rank's contribution to the mean over all tokens."""
        present = masks.current(self)
        targets = present.inputs.targets if isinstance(present, _Pass) else None
        if not isinstance(present, _Pass) or targets is None:
            return self._loss(logits=logits, labels=labels, vocab_size=vocab_size, **others)
        present.loss_called, inputs = True, present.inputs
        # FSDP averages over the ranks of the context group, too, and of that average each token is to be one share.
        count = others.pop("num_items_in_batch", None)
        others["num_items_in_batch"] = (inputs.counted if count is None else count) / inputs.tokens.size
        others["shift_labels"] = targets.to(logits.device).contiguous()
        return self._loss(logits=logits, labels=labels, vocab_size=vocab_size, **others)

    def after(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Check the pass, and replace the loss value by the loss over all tokens."""
        present = masks.leave(self)
        if not isinstance(present, _Pass) or output is None:  # the pass raised
            return None
        inputs = present.inputs
        _check_layers(model, present.made)
        if inputs.targets is None:
            return None
        as_tuple = isinstance(output, tuple)
        loss = output[0] if as_tuple else output.loss
        if not present.loss_called:
            raise NotImplementedError(
                f"{type(model).__name__} computes its loss without its loss_function, so next-token labels across the "
                "borders of chunks are missing; set context_parallel_degree=1 for this model"
            )
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=inputs.tokens.group)
        # The value is that of the group, the gradient this rank's share of it.
        loss = loss + (mean / inputs.tokens.size - loss.detach())
        if as_tuple:
            return loss, *output[1:]
        output.loss = loss
        return output


def _check_rotary(model: nn.Module, length: int) -> None:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        most = getattr(module, "original_max_seq_len", None)
        if kind in _BY_LENGTH and isinstance(most, int) and length > most:
            raise NotImplementedError(
                f"{type(model).__name__}: rotary positions of type {kind!r} depend on the length of a sequence beyond "
                f"{most} tokens, and these have {length}: no rank sees the length; set context_parallel_degree=1"
            )


def _check_layers(model: Any, made: list[masks.Mask]) -> None:
    """Raises if a layer has attended only to this rank's tokens."""
    attended = len(set().union(*(mask.attended for mask in made)))
    layers = model.config.num_hidden_layers
    if attended < layers:
        raise NotImplementedError(
            f"{type(model).__name__}: {attended} of {layers} layers attended to the whole sequence, so the others saw "
            "this rank's part alone; set context_parallel_degree=1 for this model"
        )
