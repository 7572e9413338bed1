"""A tiny model of every causal class of the installed transformers, created from its configuration's fields.

Each is right under tensor parallelism, or refused by `transform` with words that say what to change; none is wrong in
silence, and none fails later.
"""

from __future__ import annotations

import contextlib
import inspect

import smddp.sagemaker as tsm
import torch
import transformers
from smddp.sagemaker import hf
from smp_cases.tensor_parallel import initialized
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Values of configuration fields, where present. The numbers of heads must be divisible by 4.
_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "ffn_hidden_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "kv_channels": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "window_size": 8,
    "attention_window": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "unpadded_vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "image_size": 16,
    "patch_size": 8,
    "codebook_size": 96,
    "mamba_expand": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "num_kv_shared_layers": 0,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 16,
    "moe_topk": 2,
    "num_experts_per_token": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def classes() -> dict[str, str]:
    """{model type: name of the causal class}, each class once."""
    names: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if isinstance(name, str) and name not in names.values():
            names[kind] = name
    return names


LARGEST = 3_000_000


def tiny(kind: str) -> torch.nn.Module:
    """The model; raises where none can be made of these fields, or only a large one."""
    config = _small(transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind])
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return transformers.AutoModelForCausalLM.from_config(config).float()


def _small(config_class: type) -> transformers.PretrainedConfig:
    fields = inspect.signature(config_class.__init__).parameters
    known = {*fields, *vars(config_class()), *getattr(config_class, "attribute_map", {})}
    mapped = getattr(config_class, "attribute_map", {})
    small = {name: value for name, value in _SMALL.items() if name in known and name not in mapped}
    # Some count their layers' kinds.
    if "layer_types" in known and "layer_types" in fields:
        kinds = list(getattr(config_class(), "layer_types", None) or ["full_attention"])
        small["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    if "kv_lora_rank" in known:  # latent attention has as many keys as queries
        small["num_key_value_heads"] = 4
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in fields and isinstance(inner, type) and hasattr(inner, "model_type"):
            with contextlib.suppress(Exception):
                small[name] = _small(inner).to_dict()
    return config_class(**{**small, **_ODD.get(config_class.model_type, {})})


# Model-specific fields.
_ODD: dict[str, dict] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "opt": {"word_embed_proj_dim": 32},
    # Heads of 512 columns, and scores that are not scaled, take float32 to its end.
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "jamba": {"use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    # The model runs its second layer twice.
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
}

# Of both lines. They need packages, parts of other models or sizes that these fields do not give.
NOT_MADE = {
    *(
        "bailing_hybrid",
        "blt",
        "cohere_compass_text",
        "dbrx",
        "dots3_note",
        "fuyu",
        "gemma3",
        "gemma3n",
        "gemma4_assistant",
    ),
    *("gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "moshi", "moss_transcribe_diarize", "musicgen"),
    *(
        "musicgen_melody",
        "phi4_multimodal",
        "qwen4_exp",
        "reformer",
        "roc_bert",
        "xlm",
        "xmod",
        "zamba",
        "zamba2",
        "zaya",
    ),
    # In 4.57.
    *("apertus", "emu3", "gemma3n_text", "llama4", "mllama", "qdqbert", "speech_to_text_2", "transfo-xl"),
}


def all_are_right_or_refused(kinds: list[str], degree: int = 2) -> None:
    """Raises AssertionError with every class that is neither correct nor rejected."""
    wrong = []
    with initialized(tensor_parallel_degree=degree, tensor_parallel_checks=0):
        for kind in kinds:
            outcome = _outcome(kind)
            print(f"{kind}: {outcome}", flush=True)
            if (outcome.startswith("not made") and kind not in NOT_MADE) or outcome.startswith("wrong"):
                wrong.append(f"{kind}: {outcome}")
    assert not wrong, "\n".join(wrong)


def _outcome(kind: str) -> str:
    try:
        model = tiny(kind)
        inputs = hf.tiny_inputs(model, seed=1)
        inputs["labels"] = inputs["input_ids"]
        model(**inputs).loss.backward()
    except Exception as error:
        return f"not made: {type(error).__name__} {error}"
    try:
        tsm.transform(tiny(kind))
    except (ValueError, NotImplementedError) as error:
        says_what_to_do = "tensor_parallel_degree" in str(error) or "tp_plan" in str(error)
        return f"{'refused' if says_what_to_do else 'wrong'}: {error}"
    try:
        difference = tsm.verify(tiny(kind), inputs)
    except Exception as error:
        return f"wrong: {type(error).__name__} {error}"
    return f"{'right' if difference < 1e-5 else 'wrong'}: {difference:.1e}"
