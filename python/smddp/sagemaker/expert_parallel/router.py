"""The model's router with balanced expert choice and auxiliary losses.

Router outputs differ between families and versions; `balanced_router` interprets them. Layers of 4.57 that choose
experts from a plain linear router's logits get a replaced forward pass (`ListedLayer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smddp.sagemaker.expert_parallel import balancing
from smddp.sagemaker.expert_parallel.families import Family
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.tensor_parallel.mixins import Mixin, extend


@dataclass(frozen=True)
class Routing:
    """Settings of a layer's router."""

    family: Family
    config: MoEConfig

    def __call__(
        self, options: Any, logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the choice, (tokens, k) each, from the router's own."""
        kind, k = self.config.moe_load_balancing, chosen.shape[1]
        if kind == "sinkhorn" and training:
            chosen = balancing.sinkhorn(logits, k)
            weights = self.family.weigh(options, logits, chosen).to(weights.dtype)
        elif kind == "balanced":
            from smddp.sagemaker.state_handler import state

            before = (state.dp_rank * state.cp_size + state.cp_rank) * len(logits)
            chosen = balancing.round_robin(len(logits), k, logits.shape[1], before, logits.device)
            weights = self.family.weigh(options, logits, chosen).to(weights.dtype)
        # A checkpointed layer passes here without gradients first: the pass that is recomputed counts.
        if training and torch.is_grad_enabled():
            added = []
            if kind == "aux_loss" and self.config.moe_aux_loss_coeff > 0:
                loss = balancing.aux_loss(self.family.probabilities(logits), chosen)
                added.append(self.config.moe_aux_loss_coeff * loss)
            if self.config.moe_z_loss_coeff > 0:
                added.append(self.config.moe_z_loss_coeff * balancing.z_loss(logits))
            if added and logits.requires_grad:
                weights = balancing.add_loss(weights, torch.stack(added).sum())
        return weights, chosen


class _Router(Mixin):
    """Mixin for a router that is a separate module."""

    _ep_routing: Routing

    def forward(self, hidden: torch.Tensor) -> Any:
        return self._routed(hidden, super().forward(hidden))

    def _routed(self, hidden: torch.Tensor, made: Any) -> Any:
        raise NotImplementedError


class TripleRouter(_Router):
    """Returns (logits, weights, choice), as all of transformers 5 do."""

    def _routed(self, hidden: torch.Tensor, made: Any) -> Any:
        logits, weights, chosen = made
        return logits, *self._ep_routing(self, logits, weights, chosen, self.training)


class ScoresRouter(_Router):
    """GPT-OSS in 4.57: returns the weights of all experts, 0 for those not chosen, and the choice."""

    weight: torch.Tensor
    bias: torch.Tensor

    def _routed(self, hidden: torch.Tensor, made: Any) -> Any:
        scores, chosen = made
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight, self.bias)
        weights, chosen = self._ep_routing(self, logits, scores.gather(1, chosen), chosen, self.training)
        return torch.zeros_like(scores).scatter(1, chosen, weights), chosen


class PairRouter(_Router):
    """DeepSeek-V3 in 4.57: returns (choice, weights)."""

    weight: torch.Tensor

    def _routed(self, hidden: torch.Tensor, made: Any) -> Any:
        chosen, weights = made
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), self.weight.float())
        weights, chosen = self._ep_routing(self, logits, weights, chosen, self.training)
        return chosen, weights


class ListedLayer(Mixin):
    """Mixtral, Qwen2-MoE and Qwen3-MoE in 4.57: the layer itself chooses, by the logits of a linear router."""

    _ep_routing: Routing
    gate: nn.Module
    experts: nn.Module
    shared_expert: nn.Module  # these two in Qwen2-MoE alone
    shared_expert_gate: nn.Module
    top_k: int

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, hidden) -> the same, and the router's logits (tokens, experts)."""
        noise = getattr(self, "jitter_noise", 0.0)
        if self.training and noise > 0:
            hidden = hidden * torch.empty_like(hidden).uniform_(1.0 - noise, 1.0 + noise)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self.gate(tokens)
        chosen = logits.softmax(-1, dtype=torch.float).topk(self.top_k, -1).indices
        weights = self._ep_routing.family.weigh(self, logits, chosen).to(hidden.dtype)
        weights, chosen = self._ep_routing(self, logits, weights, chosen, self.training)
        result = self.experts(tokens, chosen, weights)
        if hasattr(self, "shared_expert"):
            result = result + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        return result.view(hidden.shape), logits


class ListedMoe(Mixin):
    """DeepSeek-V3 in 4.57: the layer calls this with what its router chose."""

    experts: nn.Module

    def moe(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(tokens, chosen, weights)


class ScoredExperts(Mixin):
    """GPT-OSS in 4.57: its experts are called with the weights of all experts."""

    def forward(self, tokens: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> Any:
        return super().forward(tokens, router_indices, routing_weights.gather(1, router_indices))


def balance(layer: Any, routing: Routing, listed: bool) -> None:
    """Make ``layer`` route by ``routing``; ``listed``: its experts were a list of modules. Its experts are spread."""
    router = getattr(layer, routing.family.router)
    if isinstance(router, nn.Linear):
        extend(layer, ListedLayer)._ep_routing = routing
    elif listed:
        extend(router, PairRouter)._ep_routing = routing
        extend(layer, ListedMoe)
    elif _returns_scores(router):
        extend(router, ScoresRouter)._ep_routing = routing
        extend(layer.experts, ScoredExperts)
    else:
        extend(router, TripleRouter)._ep_routing = routing


def _returns_scores(router: nn.Module) -> bool:
    """Returns True for GPT-OSS's router of 4.57, which differs from version 5's only in its return value."""
    from smddp.sagemaker import hf

    return type(router).__name__ == "GptOssTopKRouter" and hf.is_before_5()
