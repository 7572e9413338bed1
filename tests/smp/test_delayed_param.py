"""`DelayedParamIniter` in one process: values, rejected input, and the validator's reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="delayed initialization of transformers models")

from smddp.sagemaker.delayed_param import DelayedParamIniter
from smp_cases.models import FAMILIES, batch, config, loss_of, tiny

FEW = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4}


def on_meta(settings) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings)


def initialised(model: nn.Module, **options) -> nn.Module:
    delayed = DelayedParamIniter(model, device="cpu", **options)
    with delayed.validate_params_and_buffers_inited():
        return delayed.materialize()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_meta_model_becomes_what_its_constructor_makes(family, tied):
    """Same names, ties, buffers and constant parameters as the plain model, and computes the same from its weights."""
    plain, model = tiny(family, tie_word_embeddings=tied), on_meta(config(family, tie_word_embeddings=tied))
    initialised(model)
    found, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        constant = value.numel() > 1 and bool((value == value.flatten()[0]).all())
        if constant:
            assert torch.equal(found[name], value), name
        else:
            assert 0.5 < float(found[name].detach().std() / value.detach().std()) < 2.0, name
            assert not torch.equal(found[name], value), name
    for name, value in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name
    model.load_state_dict(plain.state_dict())
    assert torch.equal(loss_of(model, batch(0)), loss_of(plain, batch(0)))


def test_values_follow_from_seed_and_name_alone():
    whole = initialised(on_meta(config("llama")))
    # Another number of layers, other modules around it, another order, another state of the global generator.
    torch.manual_seed(123)
    model = on_meta(config("llama", num_hidden_layers=3))
    delayed = DelayedParamIniter(model, device="cpu")
    state = torch.get_rng_state()
    for module in reversed(list(model.modules())):
        delayed.get_param_init_fn()(module)
    assert torch.equal(torch.get_rng_state(), state), "initialisation drew from the global generator"
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if name in wanted:
            assert torch.equal(parameter, wanted[name]), name
    first, second = model.model.layers[0].mlp.gate_proj.weight, model.model.layers[1].mlp.gate_proj.weight
    assert not torch.equal(first, second)
    other = initialised(on_meta(config("llama")), random_seed=1)
    assert not torch.equal(other.lm_head.weight, whole.lm_head.weight)


def test_values_that_a_module_sets_in_its_children_hold_in_every_order():
    """GPT-2's attention scales its projection; FSDP initialises parents first, and children on their own."""
    settings = config("gpt2", n_embd=64, n_layer=8)
    model = on_meta(settings)
    initialised(model)
    expected = settings.initializer_range / (2 * settings.n_layer) ** 0.5
    for block in model.transformer.h:
        assert abs(float(block.attn.c_proj.weight.detach().std()) / expected - 1) < 0.1
        assert abs(float(block.attn.c_attn.weight.detach().std()) / settings.initializer_range - 1) < 0.1


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mamba", {"state_size": 8}),
        ("gemma3_text", {"head_dim": 8, "intermediate_size": 64}),
        ("gptj", {"rotary_dim": 4}),
    ],
)
def test_values_set_only_by_constructors_are_found(kind, more):
    """Parameters that no initialisation writes in some version, scales of embeddings, tables of positions."""
    names = {"n_layer": 2, "n_embd": 32, "n_head": 4} if kind == "gptj" else FEW
    settings = transformers.AutoConfig.for_model(kind, **{**names, "vocab_size": 96, **more})
    plain, model = transformers.AutoModelForCausalLM.from_config(settings), initialised(on_meta(settings))
    for name, value in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name
    if kind == "mamba":
        mine, theirs = model.backbone.layers[1].mixer, plain.backbone.layers[1].mixer
        assert torch.equal(mine.A_log, theirs.A_log) and torch.equal(mine.D, theirs.D)


def test_modules_without_transformers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.layers = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Embedding(5, 4, padding_idx=2))
            self.transformer = nn.TransformerEncoderLayer(4, 2, 8)

    with torch.device("meta"):
        net = Net()
    initialised(net)
    assert torch.equal(net.norm.running_var, torch.ones(4)) and int(net.norm.num_batches_tracked) == 0
    assert not net.attention.out_proj.bias.any() and net.attention.in_proj_weight.std() > 0
    assert not net.layers[2].weight[2].any() and net.layers[2].weight[1].any()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))


def test_a_module_without_initialisation_is_reported():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Odd())
    with pytest.raises(ValueError, match=r"1\.scale \(Odd\), 1\.table \(Odd\).*reset_parameters"):
        DelayedParamIniter(model)


def test_a_custom_initialisation_function():
    """It sees real memory of each module's own parameters, once, in its own random stream."""
    seen = []

    def fill(module: nn.Module) -> None:
        if module._parameters:
            seen.append(type(module).__name__)
            assert not any(p.is_meta for p in module.parameters(recurse=False))
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    initialised(model, init_method_using_config=fill)
    assert seen == ["Linear", "Linear"]
    assert not torch.equal(model[0].weight, model[1].weight)
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    delayed = DelayedParamIniter(again, init_method_using_config=fill, device="cpu")
    for module in (again[1], again[0]):
        delayed.get_param_init_fn()(module)
    assert torch.equal(again[1].weight, model[1].weight)


def test_a_custom_function_that_leaves_the_module_on_meta_is_reported():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    delayed = DelayedParamIniter(model, init_method_using_config=lambda module: module.to("meta"), device="cpu")
    with pytest.raises(ValueError, match=r"init_method_using_config left (weight|bias)"):
        delayed.materialize()


def test_the_validator_reports_missed_and_repeated_modules():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    delayed = DelayedParamIniter(model, device="cpu")
    function = delayed.get_param_init_fn()
    with pytest.raises(RuntimeError, match=r"2 tensors.*1\.weight, 1\.bias"):
        with delayed.validate_params_and_buffers_inited():
            function(model[0])
    function(model[1])
    with pytest.raises(RuntimeError, match="1 modules were initialised more than once: 0"):
        with delayed.validate_params_and_buffers_inited():
            function(model[0])
    with delayed.validate_params_and_buffers_inited(enabled=False):
        function(model[1])


def test_the_validators_error_does_not_hide_the_one_inside():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    delayed = DelayedParamIniter(model)
    with pytest.raises(KeyError), delayed.validate_params_and_buffers_inited():
        raise KeyError("theirs")


def test_a_model_without_meta_tensors_is_unchanged(caplog):
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with caplog.at_level("INFO", logger="smddp.sagemaker"):
        initialised(model)
    assert torch.equal(model.weight, before)
    assert "nothing to do" in caplog.text


def test_real_parameters_and_buffers_beside_meta_ones_keep_their_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias = nn.Parameter(torch.full((2,), 7.0))
    model[1].running_mean = torch.full((2,), 5.0)
    initialised(model)
    assert model[0].bias.tolist() == [7.0, 7.0] and model[1].running_mean.tolist() == [5.0, 5.0]


def test_models_of_accelerates_init_empty_weights_keep_ties_and_buffers():
    accelerate = pytest.importorskip("accelerate")
    settings = config("gpt2", tie_word_embeddings=True)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(settings)
    initialised(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    same = initialised(on_meta(settings))
    for name, value in same.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name


def test_dtype_requires_grad_and_attributes_are_kept():
    model = on_meta(config("llama")).to(torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    model.lm_head.weight.mark = "mine"
    initialised(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.lm_head.weight.requires_grad and model.lm_head.weight.mark == "mine"
    assert model.model.norm.weight.requires_grad


def test_parameters_are_counted_once():
    model = on_meta(config("gpt2", tie_word_embeddings=True))
    delayed = DelayedParamIniter(model, device="cpu")
    assert delayed.count_num_params(model) == sum(p.numel() for p in model.parameters())
    assert delayed.count_num_params(model.lm_head, model.transformer.wte) == model.lm_head.weight.numel()


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not int"):
        DelayedParamIniter(3)
    with pytest.raises(TypeError, match="function of one module, not str"):
        DelayedParamIniter(nn.Linear(1, 1), init_method_using_config="normal")
    delayed = DelayedParamIniter(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="Linear was not in the model"):
        delayed.get_param_init_fn()(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="made for"):
        delayed.materialize(nn.Linear(1, 1))
