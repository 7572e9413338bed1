"""Models of published scripts that replace `PreTrainedModel.init_weights` by nothing before they make their model."""

import pytest
import torch
from smddp.modelparallel.creation import model_creation

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import PreTrainedModel

SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
CONFIGS = {
    "GPT2": transformers.GPT2Config(**SIZES),
    "GPTNeo": transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]
    ),
    "GPTJ": transformers.GPTJConfig(**SIZES, rotary_dim=4, tie_word_embeddings=False),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_values_equal_those_of_a_script_that_keeps_init_weights(family, monkeypatch):
    def make():
        torch.manual_seed(3)
        with model_creation(tensor_parallelism=True):
            return transformers.AutoModelForCausalLM.from_config(CONFIGS[family])

    expected = make()
    script = lambda model: None  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "init_weights", script)
    found = make()
    assert PreTrainedModel.init_weights is script
    tied = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert tied == (family != "GPTJ")
    for (name, value), reference in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_script_skips_values_outside_of_tensor_parallelism(monkeypatch):
    calls = []
    monkeypatch.setattr(PreTrainedModel, "init_weights", lambda model: calls.append(model))
    with model_creation():
        transformers.GPT2LMHeadModel(CONFIGS["GPT2"])
    assert calls
