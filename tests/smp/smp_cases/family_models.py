"""Tiny models of the families that have a plan of our own or a style that no other has, and what they are trained on.

Dropout between blocks is on, which all ranks draw alike; in blocks it is off, as each rank draws for its own heads.
"""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 96
_ENDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    **_ENDS,
}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    **_ENDS,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
    **_ENDS,
}
_OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    **_ENDS,
}
# Heads of 24 columns, of which a third has positions, as the published ones.
_DEEPSEEK = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "alibi": True,
}

# Name of the case -> (configuration, its fields, model).
MODELS: dict[str, tuple[str, dict, str]] = {
    "bert": ("BertConfig", _BERT, "BertForMaskedLM"),
    "bert_classifier": ("BertConfig", _BERT, "BertForSequenceClassification"),
    "bert_decoder": (
        "BertConfig",
        {**_BERT, "is_decoder": True, "add_cross_attention": True, "attn_implementation": "eager"},
        "BertLMHeadModel",
    ),
    "bert_relative": ("BertConfig", {**_BERT, "position_embedding_type": "relative_key_query"}, "BertForMaskedLM"),
    "roberta": ("RobertaConfig", _BERT, "RobertaForMaskedLM"),
    "xlm_roberta": ("XLMRobertaConfig", {**_BERT, "tie_word_embeddings": False}, "XLMRobertaForMaskedLM"),
    "camembert": ("CamembertConfig", _BERT, "CamembertForMaskedLM"),
    "electra": ("ElectraConfig", {**_BERT, "embedding_size": 32}, "ElectraForMaskedLM"),
    "ernie": ("ErnieConfig", _BERT, "ErnieForMaskedLM"),
    "data2vec_text": ("Data2VecTextConfig", _BERT, "Data2VecTextForMaskedLM"),
    "opt": ("OPTConfig", {**_OPT, "dropout": 0.1}, "OPTForCausalLM"),
    "opt_350m": ("OPTConfig", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}, "OPTForCausalLM"),
    "t5": ("T5Config", _T5, "T5ForConditionalGeneration"),
    "t5_gated": (
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "T5ForConditionalGeneration",
    ),
    "mt5": ("MT5Config", _T5, "MT5ForConditionalGeneration"),
    "bart": ("BartConfig", _BART, "BartForConditionalGeneration"),
    "bart_decoder": ("BartConfig", _BART, "BartForCausalLM"),
    "mbart": ("MBartConfig", _BART, "MBartForConditionalGeneration"),
    "plbart": ("PLBartConfig", _BART, "PLBartForConditionalGeneration"),
    "pegasus": ("PegasusConfig", _BART, "PegasusForConditionalGeneration"),
    "marian": ("MarianConfig", _BART, "MarianMTModel"),
    "blenderbot": ("BlenderbotConfig", _BART, "BlenderbotForConditionalGeneration"),
    "blenderbot_small": ("BlenderbotSmallConfig", _BART, "BlenderbotSmallForConditionalGeneration"),
    "xglm": (
        "XGLMConfig",
        {
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            **_ENDS,
        },
        "XGLMForCausalLM",
    ),
    "biogpt": ("BioGptConfig", {**_BERT, "activation_dropout": 0.0}, "BioGptForCausalLM"),
    "vit": (
        "ViTConfig",
        {
            **{key: value for key, value in _BERT.items() if key not in _ENDS},
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 8,
        },
        "ViTForImageClassification",
    ),
    "gptj": (
        "GPTJConfig",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 8,
            "n_positions": 64,
            "n_inner": 64,
            "resid_pdrop": 0.1,
            **_ENDS,
        },
        "GPTJForCausalLM",
    ),
    "gpt2_decoder": (
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "add_cross_attention": True,
            "attn_pdrop": 0.0,
            **_ENDS,
        },
        "GPT2LMHeadModel",
    ),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, **_ENDS},
        "BloomForCausalLM",
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "intermediate_size": 64,
            "window_size": 8,
            "max_position_embeddings": 64,
            "resid_dropout": 0.1,
            **_ENDS,
        },
        "GPTNeoForCausalLM",
    ),
    "stablelm": ("StableLmConfig", {**_SIZES, "num_key_value_heads": 2}, "StableLmForCausalLM"),
    "stablelm_norms": (
        "StableLmConfig",
        {**_SIZES, "num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True},
        "StableLmForCausalLM",
    ),
    "persimmon": ("PersimmonConfig", {**_SIZES, "hidden_dropout": 0.1}, "PersimmonForCausalLM"),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "MptForCausalLM",
    ),
    "falcon_alibi": ("FalconConfig", _FALCON, "FalconForCausalLM"),
    "falcon_alibi_grouped": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "attn_implementation": "eager"},
        "FalconForCausalLM",
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "GptOssForCausalLM",
    ),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK, "DeepseekV3ForCausalLM"),
    "deepseek_v3_whole_queries": ("DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": None}, "DeepseekV3ForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK, "DeepseekV2ForCausalLM"),
    "minicpm3": (
        "MiniCPM3Config",
        {key: _DEEPSEEK[key] for key in _DEEPSEEK if key in _SIZES or key.endswith(("rank", "head_dim", "heads"))},
        "MiniCPM3ForCausalLM",
    ),
    # Two attention modules a layer, and experts that return what they get.
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **{key: value for key, value in _DEEPSEEK.items() if key not in ("num_hidden_layers", "intermediate_size")},
            "num_layers": 2,
            "head_dim": 8,  # of the part with positions
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        "LongcatFlashForCausalLM",
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
        "Llama4ForCausalLM",
    ),
    # Values of another size than keys, and twice as many of both in the layers that have sinks.
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **_SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "v_head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        "MiMoV2FlashForCausalLM",
    ),
}

# Transformers 4.57 cannot initialize the first and does not know the others.
IN_5_ONLY = ("stablelm_norms", "mimo_v2_flash", "minicpm3")


def names() -> list[str]:
    """The cases that the installed transformers knows."""
    is_5 = int(transformers.__version__.split(".")[0]) >= 5
    return [name for name in MODELS if is_5 or name not in IN_5_ONLY]


def tiny(name: str) -> torch.nn.Module:
    """The model in float32, in training mode, whose values depend on the seed alone and are nowhere zero throughout."""
    config_name, sizes, class_name = MODELS[name]
    torch.manual_seed(0)
    # Eager attention, as that of some families drops out only so.
    model = getattr(transformers, class_name)._from_config(getattr(transformers, config_name)(**sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.train()


def inputs(model: torch.nn.Module, step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    """A batch, the same on every rank: arguments of the forward, labels included, half of the samples padded."""
    generator = torch.Generator().manual_seed(1000 + step)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        pixels = torch.randn((samples, 3, size, size), generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 8, (samples,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (samples, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    if "SequenceClassification" in type(model).__name__:
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(ids % 5 == 0, -100, ids)}
    if getattr(model.config, "add_cross_attention", False):
        hidden = torch.randn((samples, 7, model.config.hidden_size), generator=generator)
        arguments["encoder_hidden_states"] = hidden
    return arguments
