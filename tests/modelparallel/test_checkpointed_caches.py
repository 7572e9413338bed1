"""Activation checkpointing of transformers' layers with `use_cache`, the default of pretrained configurations.

Gradients equal those of the model without checkpointing and without a cache.
"""

import pytest
import torch
from smddp.modelparallel.activation import set_activation_checkpointing

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "use_cache": True}
GPT = {**SIZES, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
WIDE = {
    **SIZES,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
FAMILIES = {
    "GPT2": (GPT, "transformer.h"),
    "GPTJ": ({**GPT, "rotary_dim": 4}, "transformer.h"),
    "GPTNeoX": (WIDE, "gpt_neox.layers"),
    "Llama": (WIDE, "model.layers"),
    "Bloom": ({**SIZES, "hidden_size": 16, "n_layer": 2, "n_head": 2}, "transformer.h"),
    "T5": (
        {**SIZES, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        "decoder.block",
    ),
}


def make(family):
    sizes, layers = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(family, "ForCausalLM")
    torch.manual_seed(3)
    model = getattr(transformers, family + kind)(config).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, model.get_submodule(layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_without_checkpointing(family):
    ids = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(5))
    expected, _ = make(family)
    expected(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model, layers = make(family)
    set_activation_checkpointing(layers)
    model(input_ids=ids, labels=ids).loss.backward()
    for (name, found), reference in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, reference.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_cache_is_kept_without_gradients():
    model, layers = make("GPT2")
    set_activation_checkpointing(layers)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        cache = model.eval()(input_ids=ids).past_key_values
    assert cache.get_seq_length() == 4
    with pytest.raises(ValueError, match=r"GPT2Block received past_key_values of 4 positions, .*use_cache"):
        model(input_ids=ids, past_key_values=cache)
