"""Plans for families of transformers without a plan or with an incomplete plan.

One row a family: `config.model_type` -> {pattern: style}. Patterns are relative to any of the family's models (the base
model, one with a head, an encoder or a decoder), and what a configuration lacks is passed over, so one row holds both
lines of transformers. `styles.py` says what the styles do.
"""

from __future__ import annotations

Plan = dict[str, str]

_HEAD: Plan = {"lm_head": "colwise_gather_output"}
_GATED = ("gate_proj", "up_proj")


def _pairs(before: str, up: tuple[str, ...], down: str) -> Plan:
    """The projections ``up`` that begin a region, and the one, ``down``, that ends it."""
    return {**{f"{before}{name}": "colwise" for name in up}, f"{before}{down}": "rowwise"}


_QKV = ("q_proj", "k_proj", "v_proj")
_BERT_QKV = ("self.query", "self.key", "self.value")

# BERT and what was made from it: an encoder or, with cross-attention, a decoder.
_BERT: Plan = {
    **_pairs("encoder.layer.*.attention.", _BERT_QKV, "output.dense"),
    **_pairs("encoder.layer.*.crossattention.", _BERT_QKV, "output.dense"),
    # Relative positions of single heads, used by the heads of every rank.
    "encoder.layer.*.attention.self.distance_embedding": "replicated_with_grad_allreduce",
    "encoder.layer.*.crossattention.self.distance_embedding": "replicated_with_grad_allreduce",
    **_pairs("encoder.layer.*.", ("intermediate.dense",), "output.dense"),
}
_BERT_HEAD: Plan = {
    "cls.predictions.decoder": "colwise_gather_output",
    "cls.predictions.bias": "tied",
}
_ROBERTA_HEAD: Plan = {"lm_head.decoder": "colwise_gather_output", "lm_head.bias": "tied"}

# BART and what was made from it: patterns are relative to its encoder and to its decoder.
_BART: Plan = {
    **_pairs("layers.*.self_attn.", _QKV, "out_proj"),
    **_pairs("layers.*.encoder_attn.", _QKV, "out_proj"),
    **_pairs("layers.*.", ("fc1",), "fc2"),
    **_HEAD,
}

_T5: Plan = {
    **{
        pattern: style
        for i, attention in ((0, "SelfAttention"), (1, "EncDecAttention"))
        for pattern, style in _pairs(f"block.*.layer.{i}.{attention}.", ("q", "k", "v"), "o").items()
    },
    "block.*.layer.0.SelfAttention.relative_attention_bias": "bias_by_head",
    **_pairs("block.*.layer.*.DenseReluDense.", ("wi", "wi_0", "wi_1"), "wo"),
    **_HEAD,
}

# Latent attention: what is before its heads is whole. Transformers' plans leave all of it so, or cut the latents.
_DEEPSEEK: Plan = {
    **_pairs("layers.*.self_attn.", ("q_proj", "q_b_proj", "kv_b_proj"), "o_proj"),
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    **_pairs("layers.*.mlp.", _GATED, "down_proj"),
    **_pairs("layers.*.mlp.shared_experts.", _GATED, "down_proj"),
    "layers.*.mlp.experts": "moe_tp_experts",
    # In 4.57.
    **_pairs("layers.*.mlp.experts.*.", _GATED, "down_proj"),
    # In 5.
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    **_HEAD,
}

PLANS: dict[str, Plan] = {
    "bert": {**_BERT, **_BERT_HEAD},
    "roberta": {**_BERT, **_ROBERTA_HEAD},
    "xlm-roberta": {**_BERT, **_ROBERTA_HEAD},
    "camembert": {**_BERT, **_ROBERTA_HEAD},
    "data2vec-text": {**_BERT, **_ROBERTA_HEAD},
    "ernie": {**_BERT, **_BERT_HEAD},
    "electra": {**_BERT, "generator_lm_head": "colwise_gather_output"},
    "opt": {
        **_pairs("decoder.layers.*.self_attn.", _QKV, "out_proj"),
        **_pairs("decoder.layers.*.", ("fc1",), "fc2"),
        **_HEAD,
    },
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "pegasus": _BART,
    "marian": _BART,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "plbart": _BART,
    "xglm": _BART,
    "biogpt": {**_BART, "output_projection": "colwise_gather_output"},
    "vit": {
        # In 4.57.
        **_pairs("encoder.layer.*.attention.", ("attention.query", "attention.key", "attention.value"), "output.dense"),
        **_pairs("encoder.layer.*.", ("intermediate.dense",), "output.dense"),
        # In 5.
        **_pairs("layers.*.attention.", _QKV, "o_proj"),
        **_pairs("layers.*.mlp.", ("fc1",), "fc2"),
    },
    "gptj": {
        **_pairs("h.*.attn.", _QKV, "out_proj"),
        **_pairs("h.*.mlp.", ("fc_in",), "fc_out"),
        **_HEAD,
    },
    "bloom": {
        "h.*.self_attention": "alibi_by_head",
        "h.*.self_attention.query_key_value": "interleaved_qkv_colwise",
        "h.*.self_attention.dense": "rowwise",
        **_pairs("h.*.mlp.", ("dense_h_to_4h",), "dense_4h_to_h"),
        **_HEAD,
    },
    "gpt_neo": {
        **_pairs("h.*.attn.attention.", _QKV, "out_proj"),
        **_pairs("h.*.mlp.", ("c_fc",), "c_proj"),
        **_HEAD,
    },
    "stablelm": {
        **_pairs("layers.*.self_attn.", _QKV, "o_proj"),
        "layers.*.self_attn.q_layernorm": "norms_by_head",
        "layers.*.self_attn.k_layernorm": "norms_by_head",
        **_pairs("layers.*.mlp.", _GATED, "down_proj"),
        **_HEAD,
    },
    "gpt2": {
        "h.*.attn.c_attn": "packed_qkv_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.c_attn": "packed_colwise",  # [k | v]
        **_pairs("h.*.crossattention.", ("q_attn",), "c_proj"),
        **_pairs("h.*.mlp.", ("c_fc",), "c_proj"),
        **_HEAD,
    },
    "gpt_neox": {
        "layers.*.attention.query_key_value": "interleaved_qkv_colwise",
        "layers.*.attention.dense": "rowwise",
        **_pairs("layers.*.mlp.", ("dense_h_to_4h",), "dense_4h_to_h"),
        **_HEAD,
        "embed_out": "colwise_gather_output",  # the head in 4.57
    },
    "persimmon": {
        "layers.*.self_attn.query_key_value": "interleaved_qkv_colwise",
        "layers.*.self_attn.dense": "rowwise",
        **_pairs("layers.*.mlp.", ("dense_h_to_4h",), "dense_4h_to_h"),
        **_HEAD,
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {
        **_pairs("layers.*.self_attn.", _QKV, "o_proj"),
        "layers.*.self_attn": "local_params",
        "layers.*.self_attn.sinks": "colwise",
        # Stored as (experts, in, out), with gate and up interleaved.
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "bias_of_sum",
        **_HEAD,
    },
    "falcon": {
        "h.*.self_attention": "alibi_by_head",
        "h.*.self_attention.query_key_value": "grouped_qkv_colwise",
        "h.*.self_attention.dense": "rowwise",
        **_pairs("h.*.mlp.", ("dense_h_to_4h",), "dense_4h_to_h"),
        **_HEAD,
    },
    "mpt": {
        "blocks.*.attn": "alibi_by_head",
        "blocks.*.attn.Wqkv": "packed_qkv_colwise",
        "blocks.*.attn.out_proj": "rowwise",
        **_pairs("blocks.*.ffn.", ("up_proj",), "down_proj"),
        **_HEAD,
    },
}
