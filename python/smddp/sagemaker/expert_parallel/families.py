"""Names of an expert layer's parts, and the weighting of chosen experts, by model family.

`FAMILIES` has one row per layer class with all differences between families. transformers 5 stores experts as stacked
parameters, 4.57 mostly as a list of modules, which `spread` stacks. Routers also return different values, see
`router.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Weigh = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Compute = Callable[[Any, Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One class of layers.

    Attributes:
        router: the router's name in the layer; its experts are called `experts` everywhere.
        listed: the names of gate, up and down projection of one expert where experts are a list.
        weigh: the weights, (tokens, k), of chosen experts (tokens, k) by the router's logits (tokens, experts), as the
            router itself weighs them; the first argument is who knows the options, the router or the layer.
        probabilities: of (tokens, experts) logits, rows that sum to 1.
        compute: one expert, from its matrices by name and (rows, hidden), to (rows, hidden); the first argument is
            the experts' module, for its activation.
        cut: parameter -> (dimension that a tensor group shares, equal parts side by side in it).
    """

    router: str
    listed: tuple[str, str, str] | None
    weigh: Weigh
    probabilities: Callable[[torch.Tensor], torch.Tensor]
    compute: Compute
    cut: Mapping[str, tuple[int, int]]


# ---- weights ----


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1, dtype=torch.float)


def _sigmoid_shares(logits: torch.Tensor) -> torch.Tensor:
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _mixtral(options: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights = _softmax(logits).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True)


def _qwen(options: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights = _softmax(logits).gather(1, chosen)
    if options.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _gpt_oss(options: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, chosen).softmax(-1)


def _deepseek(options: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights = logits.float().sigmoid().gather(1, chosen)
    if options.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * options.routed_scaling_factor


# ---- experts ----


def _gated(module: Any, matrices: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """[gate | up], then down, each (out, in)."""
    gate, up = F.linear(rows, matrices["gate_up_proj"]).chunk(2, -1)
    return F.linear(module.act_fn(gate) * up, matrices["down_proj"])


def _gpt_oss_expert(module: Any, matrices: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Computes a GPT-OSS expert: interleaved gate and up (in, out) with biases, clamped, with a scaled swish."""
    both = rows @ matrices["gate_up_proj"] + matrices["gate_up_proj_bias"]
    gate, up = both[..., ::2].clamp(max=module.limit), both[..., 1::2].clamp(-module.limit, module.limit)
    swish = gate * torch.sigmoid(gate * module.alpha)
    return ((up + 1) * swish) @ matrices["down_proj"] + matrices["down_proj_bias"]


_GATED_CUT = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
_NAMES = ("gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, Family] = {
    "MixtralSparseMoeBlock": Family("gate", ("w1", "w3", "w2"), _mixtral, _softmax, _gated, _GATED_CUT),
    "Qwen2MoeSparseMoeBlock": Family("gate", _NAMES, _qwen, _softmax, _gated, _GATED_CUT),
    "Qwen3MoeSparseMoeBlock": Family("gate", _NAMES, _qwen, _softmax, _gated, _GATED_CUT),
    "GptOssMLP": Family("router", None, _gpt_oss, _softmax, _gpt_oss_expert, {}),
    "DeepseekV3MoE": Family("gate", _NAMES, _deepseek, _sigmoid_shares, _gated, _GATED_CUT),
}


def layers_of_experts(model: nn.Module) -> list[tuple[str, nn.Module, Family]]:
    """(name, layer, its family) of every layer of experts in ``model``."""
    found = []
    for name, module in model.named_modules():
        family = FAMILIES.get(type(module).__name__)
        if family is not None and hasattr(module, "experts") and hasattr(module, family.router):
            found.append((name, module, family))
    return found
