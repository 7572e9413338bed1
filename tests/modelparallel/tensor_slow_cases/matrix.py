"""Eight ranks: stages, tensor groups and replicas at once, more families, and larger tensor groups."""

from __future__ import annotations

from lm_training import gpt2
from tensor_cases.families import check, llama


def gpt_neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=8, max_position_embeddings=16))


def gptj():
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 8, "rotary_dim": 4}
    return GPTJForCausalLM(GPTJConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 2, "num_heads": 8}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


LAYOUTS = [
    {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True},
    {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "placement_strategy": "TPD"},
    {
        "pipeline_parallel_degree": 2,
        "microbatches": 2,
        "ddp": True,
        "placement_strategy": "spread",
        "pipeline": "simple",
    },
    {"pipeline_parallel_degree": 4, "microbatches": 4, "ddp": True},
]


def case_every_layout_trains_as_one_process(directory):
    for number, layout in enumerate(LAYOUTS):
        for family in (gpt2, llama):
            check(family, layout, bool(number % 2) == (family is llama))


def case_more_families_train_as_in_one_process(directory):
    for family in (gpt_neox, gptj, t5):
        for layout in LAYOUTS[::3]:
            check(family, layout, False)


def case_tensor_groups_of_four(directory):
    for family in (gpt_neox, gptj, t5):
        # Sums of four parts are rounded once more; T5's attention, which is not scaled, shows it.
        check(family, LAYOUTS[0], True, degree=4, within=2e-6)
        check(family, {"ddp": True}, False, degree=4, within=2e-6)
