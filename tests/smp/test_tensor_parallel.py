"""`tsm.transform` in one process with torch's fake process group: errors for invalid input, the translation of plans,
and the tracker of random states."""

from __future__ import annotations

import sys

import pytest
import smddp.sagemaker as tsm
import torch
from smddp.sagemaker import hf
from smddp.sagemaker.fsdp import hybrid
from smddp.sagemaker.rng import RngStateTracker
from smddp.sagemaker.tensor_parallel import layers, modules
from smddp.sagemaker.tensor_parallel.heads import wanted_heads
from smp_cases.models import FAMILIES, tiny
from torch.distributed.fsdp import ShardingStrategy


def shapes(model):
    return {name: (parameter.shape, type(parameter)) for name, parameter in model.named_parameters()}


def refused(model, error, match, **options):
    """Asserts that `transform` raises and leaves the model unchanged."""
    before = shapes(model), [type(module) for module in model.modules()]
    with pytest.raises(error, match=match):
        tsm.transform(model, **options)
    assert before == (shapes(model), [type(module) for module in model.modules()])


def test_transform_before_init_raises():
    refused(tiny(), RuntimeError, r"call tsm.init\(\) first")


def test_heads_that_do_not_divide_are_refused_with_the_degrees_that_work(world):
    world(3, tensor_parallel_degree=3)
    with pytest.raises(ValueError) as caught:
        tsm.transform(tiny())
    assert "num_attention_heads 4 / 3 = 1.33333" in str(caught.value)
    assert "Degrees that work for it: 1, 2, 4" in str(caught.value)


def test_a_width_that_does_not_divide_is_refused(world):
    world(4, tensor_parallel_degree=4)
    refused(tiny(intermediate_size=66), ValueError, r"mlp.gate_proj \(out\) 66 / 4 = 16.5.*work for it: 1, 2\b")


def test_a_model_without_a_plan_raises_with_instructions(world):
    world(tensor_parallel_degree=2)
    refused(torch.nn.Sequential(torch.nn.Linear(4, 4)), ValueError, "Sequential carries no plan.*tp_plan")


def test_a_plan_that_shares_the_head_alone_is_not_taken_for_tensor_parallelism(world):
    world(tensor_parallel_degree=2)
    plan = {"lm_head": "colwise_gather_output"}
    refused(tiny(), ValueError, "shares nothing in its layers, only lm_head", config={"tp_plan": plan})


def test_an_unknown_style_names_the_nearest(world):
    world(tensor_parallel_degree=2)
    plan = {"0": "columnwise"}
    refused(torch.nn.Sequential(torch.nn.Linear(4, 4)), ValueError, "did you mean 'colwise'", config={"tp_plan": plan})


def test_an_unsupported_style_raises_with_the_reason(world):
    world(tensor_parallel_degree=2)
    plan = {"0": "grouped_gemm"}
    refused(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), NotImplementedError, "expert_parallel", config={"tp_plan": plan}
    )


def test_a_plan_entry_without_a_match_is_rejected(world):
    world(tensor_parallel_degree=2)
    plan = {"1": "colwise"}
    refused(torch.nn.Sequential(torch.nn.Linear(4, 4)), ValueError, "'1' names no module", config={"tp_plan": plan})


def test_a_style_on_the_wrong_kind_of_module_is_refused(world):
    world(tensor_parallel_degree=2)
    plan = {"0": "rowwise"}
    refused(torch.nn.Sequential(torch.nn.LayerNorm(4)), ValueError, "not LayerNorm", config={"tp_plan": plan})


class Attention(torch.nn.Module):
    """A user's own: ``heads`` of 8 columns, ``key_value`` of them for keys and values, in one weight ``name``."""

    def __init__(self, name, heads, key_value=None, head_dim=True):
        super().__init__()
        self.num_heads = heads
        if key_value:
            self.num_kv_heads = key_value
        if head_dim:
            self.head_dim = 8
        setattr(self, name, torch.nn.Linear(16, (heads + 2 * (key_value or heads)) * 8))
        self.out = torch.nn.Linear(heads * 8, 16)


@pytest.mark.parametrize(
    ("attention", "style", "error", "match"),
    [
        (
            Attention("qkv_proj", 4),
            "colwise",
            ValueError,
            r"q, k and v in one weight \(96 columns\).*packed_qkv_colwise",
        ),
        (Attention("c_attn", 4, head_dim=False), "colwise", ValueError, "interleaved_qkv_colwise"),
        (Attention("first", 4), "colwise", ValueError, "q, k and v in one weight"),
        (Attention("first", 4, 2), "colwise", ValueError, "q, k and v in one weight"),
        (Attention("gate_up_proj", 4), "colwise", ValueError, "takes packed_colwise"),
        (Attention("first", 4, 2), "packed_qkv_colwise", ValueError, "4 query heads, 2 key and value heads and 64"),
        (Attention("first", 4, 2), "interleaved_qkv_colwise", ValueError, "Give q, k and v a projection each"),
        (Attention("first", 4, head_dim=False), "packed_qkv_colwise", ValueError, "give it the attribute head_dim"),
        (Attention("first", 3), "packed_qkv_colwise", ValueError, r"attention heads 3 / 2 = 1.5"),
        (Attention("first", 3, head_dim=False), "colwise", ValueError, r"attention heads 3 / 2 = 1.5"),
        (Attention("first", 4), "norms_by_head", ValueError, "a LayerNorm for each head"),
        (Attention("first", 4), "bias_by_head", ValueError, "is for nn.Embedding, not Linear"),
        (Attention("first", 4), "alibi_by_head", ValueError, "Linear does not say how many heads it has"),
        (Attention("first", 4), "mla_kv_a_proj", ValueError, "give it the attribute qk_rope_head_dim"),
        (Attention("first", 4), "packed_rowwise", ValueError, "is for parameters of experts, not Linear"),
        (Attention("first", 4), "bias_of_sum", ValueError, "is for parameters of experts, not Linear"),
    ],
)
def test_a_plan_that_would_cut_across_heads_or_parts_is_refused(world, attention, style, error, match):
    world(tensor_parallel_degree=2)
    name = next(name for name, _ in attention.named_children())
    plan = {f"0.{name}": style, "0.out": "rowwise"}
    refused(torch.nn.Sequential(attention), error, match, config={"tp_plan": plan})


def test_a_users_attention_computes_its_ranks_heads(world):
    world(tensor_parallel_degree=2)
    plan = {"0.first": "packed_qkv_colwise", "0.out": "rowwise"}
    model = tsm.transform(torch.nn.Sequential(Attention("first", 4)), config={"tp_plan": plan})
    assert model[0].num_heads == 2
    with pytest.warns(UserWarning, match=r"4 heads and does not say how large.*tsm.verify\(\)"):
        tsm.transform(
            torch.nn.Sequential(Attention("first", 4, head_dim=False)),
            config={"tp_plan": {**plan, "0.first": "colwise"}},
        )


def test_a_parameter_of_an_attention_module_itself_is_refused(world):
    world(tensor_parallel_degree=2)
    model = tiny()
    model.model.layers[1].self_attn.decay = torch.nn.Parameter(torch.zeros(2))
    refused(model, NotImplementedError, r"layers\.1\.self_attn\.decay: a parameter of the attention module itself")


def test_local_params_are_of_single_heads_or_refused(world):
    world(tensor_parallel_degree=2)
    styles = {"layers.*.self_attn": "local_params", "layers.*.self_attn.decay": "colwise"}
    plan = {**hf.plan_of(tiny()), **{f"model.{name}": style for name, style in styles.items()}}
    for elements, fits in ((4, True), (6, False)):
        model = tiny()
        for layer in model.model.layers:
            layer.self_attn.decay = torch.nn.Parameter(torch.arange(float(elements)))
        if fits:
            shared = tsm.transform(model, config={"tp_plan": plan}).model.layers[1].self_attn.decay
            assert shared.to_local().tolist() == [0.0, 1.0]
        else:
            match = r"for each of the 4 attention heads, and decay is of shape \(6,\)"
            refused(model, ValueError, match, config={"tp_plan": plan})


class Experts(torch.nn.Module):
    """Four experts with biases."""

    def __init__(self):
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.zeros(4, 16, 8))
        self.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("bias", "error", "match"),
    [
        ({}, NotImplementedError, r"0\.down_proj_bias: the plan gives no style.*tp_plan.*tensor_parallel_degree=1"),
        ({"0.down_proj_bias": "colwise"}, ValueError, "'0.down_proj_bias': style 'colwise' would cut between experts"),
    ],
)
def test_a_bias_of_experts_that_every_rank_would_add_is_refused(world, bias, error, match):
    world(tensor_parallel_degree=2)
    plan = {"0": "moe_tp_experts", "0.down_proj": "colwise", **bias}
    refused(torch.nn.Sequential(Experts()), error, match, config={"tp_plan": plan})


@pytest.mark.parametrize("degree", [1, 2])
def test_a_second_transform_is_rejected(world, degree):
    world(tensor_parallel_degree=degree)
    refused(tsm.transform(tiny()), ValueError, "transformed already")


def test_transform_after_fsdp_is_rejected(world):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    world(tensor_parallel_degree=2)
    refused(fully_shard(tiny()), ValueError, "transform first, then wrap")
    wrapped = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused(wrapped, ValueError, "transform first, then wrap")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"cp_comm_type": "ring"}, ValueError, "'ring': must be one of 'p2p', 'all_gather'"),
        ({"config": {"plan": {}}}, ValueError, "unknown key 'plan'"),
        ({"config": 3}, TypeError, "expected a dict, a MoEConfig or None, got int"),
        ({"config": {"layers": "fast"}}, ValueError, "layers='fast'"),
        ({"config": {"sequence_parallel": 1}}, TypeError, "must be a bool"),
    ],
)
def test_options_are_checked(world, options, error, match):
    world(tensor_parallel_degree=2)
    refused(tiny(), error, match, **options)


def test_what_is_not_a_module_is_refused(world):
    world()
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got str"):
        tsm.transform("llama")


def test_rank0_needs_real_parameters(world):
    world(tensor_parallel_degree=2)
    with torch.device("meta"):
        model = tiny()
    refused(model, ValueError, "rank 0 must hold real parameters", load_state_dict_from_rank0=True)


def test_a_wrapper_that_answers_for_its_models_attributes_carries_no_plan_of_its_own():
    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    assert all(name.startswith("inner.") for name in hf.plan_of(Wrapper(tiny())))


def test_a_norm_in_an_attention_block_is_of_single_heads_or_refused_whatever_its_name(world):
    world(tensor_parallel_degree=2)
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn.query_layernorm = torch.nn.LayerNorm(layer.self_attn.head_dim)
    # Its gradients are summed over the group, as each rank sees its own heads only.
    assert isinstance(tsm.transform(model).model.layers[1].self_attn.query_layernorm, modules.Partial)
    wide = tiny()
    wide.model.layers[1].self_attn.over_all = torch.nn.LayerNorm(32)
    refused(wide, NotImplementedError, r"layers\.1\.self_attn\.over_all: a norm over all heads")


class Adapted(torch.nn.Module):
    """Equivalent of PEFT's adapter of a projection."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora_A = base, torch.nn.Linear(base.in_features, 2)


def test_adapters_of_layers_that_the_plan_shares_are_refused(world):
    world(tensor_parallel_degree=2)
    model = tiny()
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    inside = torch.nn.ModuleDict({"base_model": model})
    for wrapped in (model, inside):
        refused(wrapped, NotImplementedError, r"self_attn\.q_proj is a .*Adapted around.*tensor_parallel_degree=1")


class Rows(torch.nn.Module):
    """An adapter with the attributes of PEFT's for trainable_token_indices."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.trainable_tokens_delta = base, torch.nn.ParameterDict()


def test_adapters_of_single_rows_after_transform_are_refused_with_the_remedy(world):
    world(tensor_parallel_degree=2)
    for tied in (False, True):  # whole on every rank, and shared
        model = tsm.transform(tiny(tie_word_embeddings=tied))
        with pytest.raises(NotImplementedError, match=r"embed_tokens: trainable_token_indices after transform\(\)"):
            model.model.token_adapter = Rows(model.model.embed_tokens)


@pytest.mark.parametrize(("degree", "becomes"), [(1, "NO_SHARD"), (2, "HYBRID_SHARD")])
def test_a_strategy_replaced_by_the_shard_degree_is_logged(world, degree, becomes, caplog, monkeypatch):
    world(hybrid_shard_degree=degree)
    monkeypatch.setattr(hybrid, "_said", set())
    caplog.clear()  # of what `init` says
    for asked in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy[becomes]):
        assert hybrid.placed(asked)[0].name == becomes
    assert not caplog.text
    assert hybrid.placed(ShardingStrategy.SHARD_GRAD_OP)[0].name == becomes
    assert f"asked for SHARD_GRAD_OP: hybrid_shard_degree={degree} makes it {becomes}" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan_in_this_transformers(family):
    plan = hf.plan_of(tiny(family))
    styles = set(plan.values())
    assert "rowwise" in styles and any(style.endswith("colwise") for style in styles), plan
    assert {hf.STYLE_NAMES.get(style, style) for name, style in plan.items() if "." not in name} == {
        "colwise_gather_output"
    }


class Place:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("query", "key_value", "size", "wanted"),
    [
        (8, 2, 2, [([0], 4), ([1], 4)]),
        (8, 1, 4, [([0], 2)] * 4),
        (8, 2, 4, [([0], 2), ([0], 2), ([1], 2), ([1], 2)]),
        # Ranks 1 and 2 use two heads unevenly, so every rank repeats heads.
        (12, 3, 4, [([0, 0, 0], 1), ([0, 1, 1], 1), ([1, 1, 2], 1), ([2, 2, 2], 1)]),
    ],
)
def test_each_rank_takes_the_key_and_value_heads_that_its_query_heads_use(query, key_value, size, wanted):
    assert [wanted_heads(query, key_value, Place(rank, size)) for rank in range(size)] == wanted


def test_the_tracker_forks_a_state_and_leaves_the_default_one():
    tracker = RngStateTracker()
    tracker.add("a", 1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    kept = tracker.get_states()
    with tracker.fork("a"):
        second = torch.rand(3)
    assert not torch.equal(first, second)
    tracker.set_states(kept)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), second)


def test_the_tracker_refuses_names_and_seeds_that_are_taken():
    tracker = RngStateTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="'a' already"):
        tracker.add("a", 2)
    with pytest.raises(ValueError, match="seed 1 already"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="no state 'c'"), tracker.fork("c"):
        pass


def test_transform_adds_the_state_that_scripts_hand_to_transformer_engine(world):
    world(tensor_parallel_degree=2, random_seed=7)
    tsm.transform(tiny())
    states = tsm.state.get_rng_state_tracker().get_states()
    assert torch.equal(states["model-parallel-rng"], torch.Generator().manual_seed(7).get_state())


def test_transformer_engine_needs_a_gpu_and_the_package(world, monkeypatch):
    world(tensor_parallel_degree=2)
    options = {"config": {"layers": "transformer_engine"}}
    monkeypatch.setattr(layers, "_has_gpu", lambda: False)
    refused(tiny(), RuntimeError, 'runs on GPUs only, and there is none: use "plain"', **options)
    monkeypatch.setattr(layers, "_has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    refused(tiny(), ImportError, r"needs the package transformer_engine\[pytorch\]", **options)


def test_an_engines_linear_gets_this_ranks_shards(world, monkeypatch):
    """Uses a fake engine, and checks the layers, sizes and parameters that it receives."""
    made, called = [], []

    class Linear(torch.nn.Linear):
        def __init__(self, columns, rows, bias, params_dtype, device):
            made.append((columns, rows, bias))
            super().__init__(columns, rows, bias=bias, dtype=params_dtype, device=device)

        def forward(self, x):
            called.append(self.weight)
            return super().forward(x)

    engine = type(sys)("transformer_engine.pytorch")
    engine.Linear = Linear
    monkeypatch.setitem(sys.modules, "transformer_engine", type(sys)("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    world(tensor_parallel_degree=2)
    plain = tsm.transform(tiny())
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_has_gpu", lambda: True)
        model = tsm.transform(tiny(), config={"layers": "transformer_engine"})
    assert sorted(set(made)) == [(16, 32, False), (32, 8, False), (32, 16, False), (32, 32, False), (32, 48, False)]
    assert len(made) == 2 * 7 + 1 and not any(parameter.is_meta for parameter in model.parameters())
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(called) == len(made) and not any(weight.is_meta for weight in called)
