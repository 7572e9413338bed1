"""`smp.nn.Distributed*`: transformer layers as plain modules, with a plan by which they are shared; see `layers`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from smddp.modelparallel.tensor.layers import DistributedModule, Kind

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}
# Arguments of the original's attention kernels, and what to do without them.
_NO_KERNEL = {
    "triton_flash_attention": "leave it out, and torch's own fused attention runs",
    "use_alibi": "give the biases as attn_mask, which is added to the scores",
}
# Added to the scores of what a 0-1 mask masks.
_MASKED = -10000.0


class DistributedAttentionLayer(DistributedModule):
    """Attention, its projection, dropout, the residual and layer norms, on ``(hidden_states, attention_mask)`` or,
    with ``cross_attention``, on ``(hidden_states, cross_states, attention_mask)``; masks are added to the scores.

    Without ``post_layernorm`` the residual is added all the same.
    """

    _tp_plan: ClassVar = {"query": "colwise", "key": "colwise", "value": "colwise", "dense": "rowwise"}

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
    ) -> None:
        super().__init__()
        _one_norm(pre_layernorm, post_layernorm)
        self.num_attention_heads, self.attention_head_size = num_attention_heads, attention_head_size
        self.cross_attention, self.causal = cross_attention, causal_mask_size is not None
        columns = num_attention_heads * attention_head_size
        self.query = nn.Linear(hidden_size, columns)
        self.key = nn.Linear(hidden_size, columns)
        self.value = nn.Linear(hidden_size, columns)
        self.dense = nn.Linear(columns, hidden_size)
        self.dropout1 = nn.Dropout(attention_dropout_prob)
        self.dropout2 = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        _initialize(self, use_normal_initialization, initializer_range)
        self.shared()

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden, states, mask = inputs if self.cross_attention else (inputs[0], None, inputs[1])
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        # One tensor for all three, so that they cross one border.
        source = normed if states is None else states
        query, key, value = (self._heads(x) for x in (self.query(normed), self.key(source), self.value(source)))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.attention_head_size)
        if self.causal and not self.cross_attention:
            length = scores.shape[-1]
            ahead = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
        if mask is not None:
            scores = scores + mask
        context = self.dropout1(scores.softmax(-1)) @ value
        found = self.dropout2(self.dense(context.transpose(1, 2).flatten(2)))
        return hidden + found if self.layernorm is None else self.layernorm(hidden + found)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)


class DistributedTransformerOutputLayer(DistributedModule):
    """The two projections after attention, dropout, the residual and layer norms.

    ``fp32_residual_addition``: the residual is added in single precision.
    """

    _tp_plan: ClassVar = {"dense1": "colwise", "dense2": "rowwise"}

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ) -> None:
        super().__init__()
        _one_norm(pre_layernorm, post_layernorm)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(_ACTIVATIONS)}")
        self.activation, self.fp32_residual_addition = activation, fp32_residual_addition
        self.dense1 = nn.Linear(hidden_size, intermediate_size)
        self.dense2 = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        _initialize(self, use_normal_initialization, initializer_range)
        self.shared()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        found = self.dropout(self.dense2(_ACTIVATIONS[self.activation](self.dense1(normed))))
        wide = self.fp32_residual_addition
        total = (hidden.float() + found.float()).to(hidden.dtype) if wide else hidden + found
        return total if self.layernorm is None else self.layernorm(total)


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross-attention if asked for, and the output layer, on ``(hidden_states, attention_mask)`` or
    ``(hidden_states, cross_states, attention_mask, cross_mask)``; returns the same with other hidden states."""

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ) -> None:
        super().__init__()
        self.add_cross_attention = add_cross_attention
        alike: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
        }
        self.attention = DistributedAttentionLayer(causal_mask_size=causal_mask_size, **heads, **alike)
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **heads, **alike)
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size,
            activation=activation,
            fp32_residual_addition=fp32_residual_addition,
            **alike,
        )
        self.shared()

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not self.add_cross_attention:
            hidden, mask = inputs
            return self.output(self.attention((hidden, mask))), mask
        hidden, states, mask, cross_mask = inputs
        hidden = self.cross_attention((self.attention((hidden, mask)), states, cross_mask))
        return self.output(hidden), states, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """``num_layers`` of `DistributedTransformerLayer`, in ``seq_layers``; with both layer norms, one before and one
    after all of them besides."""

    def __init__(self, num_layers: int = 12, **options: Any) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(*(DistributedTransformerLayer(**options) for _ in range(num_layers)))
        both = options.get("pre_layernorm", False) and options.get("post_layernorm", True)
        size, epsilon = options.get("hidden_size", 1024), options.get("layernorm_epsilon", 1e-5)
        self.pre_layernorm = nn.LayerNorm(size, epsilon) if both else None
        self.layernorm = nn.LayerNorm(size, epsilon) if both else None
        self.shared()

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *more = inputs
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        hidden, *more = self.seq_layers((hidden, *more))
        return hidden if self.layernorm is None else self.layernorm(hidden), *more


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a `DistributedTransformer`, and with ``add_lm_head`` a head that has the word embeddings' weight.

    It takes ``(input_ids, attention_mask, token_type_ids, position_ids, labels)`` or, with ``add_cross_attention``,
    ``(input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels)``. In masks, (batch,
    sequence), 1 is masked. It returns the logits or, with labels, the loss of predicting each token's next, and them.
    """

    _tp_plan: ClassVar = {"word_embedding": "embedding_rowwise", "lm_head": "colwise_gather_output"}

    def __init__(
        self,
        num_layers: int = 12,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        num_token_types: int = 0,
        add_lm_head: bool = True,
        hidden_size: int = 1024,
        hidden_dropout_prob: float = 0.1,
        add_cross_attention: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.add_cross_attention = add_cross_attention
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size)
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        self.dropout = nn.Dropout(hidden_dropout_prob)
        _initialize(self, options.get("use_normal_initialization", False), options.get("initializer_range", 0.02))
        self.transformer = DistributedTransformer(
            num_layers,
            hidden_size=hidden_size,
            hidden_dropout_prob=hidden_dropout_prob,
            add_cross_attention=add_cross_attention,
            **options,
        )
        self.lm_head: nn.Linear | None = None
        if add_lm_head:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
            self.lm_head.weight = self.word_embedding.weight
        self.shared()

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> Any:
        ids, mask, types, positions, *more, labels = inputs
        assert ids is not None
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden = self.word_embedding(ids) + self.position_embedding(positions)
        if types is not None and self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(types)
        hidden = self.dropout(hidden)
        states = (more[0],) if self.add_cross_attention else ()
        masks = (_added(mask, hidden), _added(more[1], hidden)) if self.add_cross_attention else (_added(mask, hidden),)
        hidden = self.transformer((hidden, *states, *masks))[0]
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class FlashAttentionLayer(nn.Module, metaclass=Kind):
    """Attention of ``(query, key, value)``, each (batch, heads, sequence, head size), by torch's fused kernels."""

    def __init__(
        self, attention_dropout_prob: float = 0.1, attention_head_size: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.attention_dropout_prob = attention_dropout_prob
        for name, instead in _NO_KERNEL.items():
            if options.pop(name, False):
                raise NotImplementedError(f"smp.nn.FlashAttentionLayer({name}=True) is not supported: {instead}")
        scaled = options.pop("scale_attention_scores", True)
        if options:
            raise TypeError(f"smp.nn.FlashAttentionLayer() has no argument {', '.join(options)}")
        self.scale = None if scaled else 1.0

    def forward(
        self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], attn_mask: Any = None, causal: bool = False
    ) -> torch.Tensor:
        dropout = self.attention_dropout_prob if self.training else 0.0
        return F.scaled_dot_product_attention(
            *qkv, attn_mask=attn_mask, dropout_p=dropout, is_causal=causal, scale=self.scale
        )


def _one_norm(pre: bool, post: bool) -> None:
    if not (pre or post):
        raise ValueError("at least one of pre_layernorm and post_layernorm must be True")


def _initialize(module: nn.Module, normal: bool, std: float) -> None:
    if normal:
        for each in module.modules():
            if isinstance(each, (nn.Linear, nn.Embedding)):
                nn.init.normal_(each.weight, std=std)
            if isinstance(each, nn.Linear) and each.bias is not None:
                nn.init.zeros_(each.bias)


def _added(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Convert a 0-1 mask (batch, sequence) to an additive mask (batch, 1, 1, sequence)."""
    return None if mask is None else mask[:, None, None].to(like.dtype) * _MASKED
