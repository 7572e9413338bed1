"""Zero gradients for listed experts without tokens on a rank.

FSDP2 reduces the gradients of those parameters of a unit that have one. Where a rank's tokens have not chosen an
expert, its parameters have none, and this rank reduces fewer elements than the others. So experts that were not called
take part in the backward pass with a gradient of zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smddp.sagemaker.private_names import pytree

_WATCHED = "_idle_watched"  # attribute of a block whose experts are watched


def watch(model: nn.Module) -> None:
    """Give uncalled experts of each block in ``model`` a zero gradient. Idempotent.

    A block is a module with experts in an `nn.ModuleList` called ``experts``.
    """
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.ModuleList) and not hasattr(block, _WATCHED):
            watcher = _Watcher()
            setattr(block, _WATCHED, watcher)
            block.register_forward_pre_hook(watcher.begin)
            for expert in experts:
                expert.register_forward_hook(watcher.called)
            block.register_forward_hook(watcher.end)


def around_fully_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fully_shard`: first watches the experts in its argument."""

    @functools.wraps(original)
    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        for root in module if isinstance(module, list | tuple) else [module]:
            watch(root)
        return original(module, *args, **kwargs)

    return watched


class _Watcher:
    """Records the experts of one block that its current forward pass called."""

    def __init__(self) -> None:
        self._called: set[int] = set()

    def begin(self, block: nn.Module, args: Any) -> None:
        self._called = set()

    def called(self, expert: nn.Module, args: Any, output: Any) -> None:
        self._called.add(id(expert))

    def end(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Returns the block's output, connected to idle experts with zero gradients."""
        experts = block.experts
        assert isinstance(experts, nn.ModuleList)
        idle = [p for expert in experts if id(expert) not in self._called for p in expert.parameters()]
        idle = [p for p in idle if p.requires_grad]
        if not idle or not torch.is_grad_enabled():
            return output
        return _with_idle(output, idle)


def _with_idle(output: Any, idle: list[nn.Parameter]) -> Any:
    """``output``, a tree of any kind that torch flattens, from which ``idle`` gets gradients of zero.

    All floating-point tensors of it that need a gradient take part, as the loss may depend on any of them; if none
    needs one, all do. An output without such tensors, or of a class that torch does not flatten, stays as it is.
    """
    leaves, structure = pytree.tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    places = [i for i in places if leaves[i].requires_grad] or places
    for i in places:
        leaves[i] = _WithIdle.apply(leaves[i], *idle)
    return pytree.tree_unflatten(leaves, structure)


class _WithIdle(torch.autograd.Function):
    """Returns the first argument; the other arguments get zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *idle: torch.Tensor) -> torch.Tensor:
        ctx.idle = idle
        return output.clone()  # of a view, a change in place would take the hooks of FSDP2 away

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.idle)
