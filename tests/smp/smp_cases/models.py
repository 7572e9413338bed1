"""Tiny transformers models of every supported family, and the batches and losses they are compared on.

Sizes are the smallest that two, three or four tensor-parallel ranks can share: 4 heads, 2 key and value heads
where the family groups them.
"""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 96
SEQUENCE = 12
BATCH = 8

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen": ("Qwen2Config", _GROUPED),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gemma": ("GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "phi": ("PhiConfig", {**_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "falcon": (
        "FalconConfig",
        {
            **{key: size for key, size in _SIZES.items() if key != "intermediate_size"},
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
}

# Families with a part that none of the above has; not every supported transformers knows them.
OTHERS: dict[str, tuple[str, dict]] = {
    "apertus": ("ApertusConfig", _GROUPED),  # an activation function that learns
    "granitemoe": ("GraniteMoeConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config(family: str, **overrides):
    """The family's transformers config at test size."""
    name, sizes = {**FAMILIES, **OTHERS}[family]
    return getattr(transformers, name)(**{**sizes, **_ENDS, **overrides})


def tiny(family: str = "llama", **overrides) -> torch.nn.Module:
    """A causal language model in float32 whose values depend on the seed alone."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(family, **overrides)).float()


def batch(step: int, length: int = SEQUENCE) -> torch.Tensor:
    """Token ids, (BATCH, length), the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def part_of(ids: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Returns the batch of data-parallel rank ``rank`` of ``size``."""
    return ids.chunk(size)[rank]


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The language-modelling loss, a scalar."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss
