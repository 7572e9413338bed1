"""Load balancing of experts, and auxiliary losses of the router.

    sinkhorn   choose by the logits after Sinkhorn normalization, which equalizes the mean number of tokens per expert
               over all data-parallel ranks (Clark et al., "Unified Scaling Laws for Routed Language Models", 2022,
               S-BASE). In training only; the weights remain the router's.
    aux_loss   choose by the router; experts x sum(share of choices x mean probability) is added to the loss
               (Shazeer et al., "Outrageously Large Neural Networks", 2017; this form: Fedus et al., "Switch
               Transformers", 2021). Shares cover the tokens of all data-parallel ranks.
    balanced   assign experts round-robin over tokens and slots, ignoring the router: every expert gets the same number.
               For measurements of a balanced router's cost, not for training.
    none       choose by the router.

    z-loss     with any method: mean(logsumexp(logits)^2) is added (Zoph et al., "ST-MoE", 2022).

Losses are added in the backward pass only, with the scale of the model's loss (see `scale_of`). So scripts read the
model's loss unchanged, and micro-batches and gradient scalers work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Sinkhorn's columns are this equal (a relative error), or these were all its rounds.
_TOLERANCE = 1e-4
_ROUNDS = 64


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all data-parallel ranks, in place."""
    from smddp.sagemaker.state_handler import state

    mesh = state.mesh
    assert mesh is not None  # a model is transformed after `init`
    for dimension in ("shard", "replicate"):
        group = mesh.get_group(dimension)
        if group.size() > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def sinkhorn(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` experts of each token, (tokens, k), of (tokens, experts) logits. Collective over the data ranks."""
    with torch.no_grad():
        # In double, as two ranks' tokens must not be divided otherwise than one process divides them.
        logits = logits.double()
        bias = torch.zeros_like(logits[0]) if len(logits) else logits.new_zeros(logits.shape[1])
        for _ in range(_ROUNDS):
            columns = _summed((logits + bias).softmax(-1).sum(0))
            wrong = columns.sum() / len(columns) / columns.clamp_min(torch.finfo(columns.dtype).tiny)
            bias += wrong.log()
            if (wrong - 1).abs().max() < _TOLERANCE:
                break
        return (logits + bias).topk(k, -1).indices


def round_robin(tokens: int, k: int, experts: int, before: int, device: torch.device) -> torch.Tensor:
    """Assigns experts round-robin: (tokens, k). ``before``: number of tokens on earlier ranks."""
    slots = torch.arange(before * k, (before + tokens) * k, device=device)
    return (slots % experts).view(tokens, k)


def aux_loss(probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the auxiliary loss of (tokens, experts) probabilities and (tokens, k) choices; 1 if balanced.

    Collective over the data-parallel ranks. With equal token counts, the mean over the ranks equals the loss of one
    process with all tokens.
    """
    experts = probabilities.shape[1]
    share = _summed(torch.bincount(chosen.flatten(), minlength=experts).to(probabilities.dtype))
    return experts * (share / share.sum() * probabilities.mean(0)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Returns the z-loss of (tokens, experts) logits, a scalar."""
    return logits.float().logsumexp(-1).square().mean()


class _Scale:
    """The factor that the model's loss has in the backward pass that runs now."""

    now: torch.Tensor | float = 1.0


class _Observed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()  # scripts and Trainer scale the loss in place, which autograd refuses for a view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Scale.now = grad.detach()
        return grad


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss = loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.loss
        return grad, torch.as_tensor(_Scale.now, dtype=dtype, device=device)


def add_loss(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``tensor``; the backward pass through it starts that of ``loss``, a scalar, too."""
    return _Added.apply(tensor, loss)


def scale_of(model: nn.Module) -> None:
    """Scale added losses by the factor of ``model``'s loss.

    It is read off where the backward pass enters the loss that ``model`` returns. A script that computes its loss
    from the logits gives added losses the factor 1.
    """

    def after(module: nn.Module, arguments: Any, output: Any) -> Any:
        _Scale.now = 1.0
        as_tuple = isinstance(output, tuple)  # return_dict=False
        loss = output[0] if as_tuple else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            return None
        observed = _Observed.apply(loss)
        if as_tuple:
            return observed, *output[1:]
        output.loss = observed
        return output

    model.register_forward_hook(after)
