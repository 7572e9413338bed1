"""`tsm.transform` trains as the plain model does: every family, every composition, and what each layer costs."""

import contextlib
import copy
import functools
import pickle

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
import transformers
from ranks.errors import refused
from smddp.sagemaker import hf
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.tensor_parallel.state_dict import (
    translate_hf_state_dict,
    translate_state_dict_to_hf,
)
from smddp.sagemaker.tensor_parallel.transformer import TETransformerLayer, TransformerLayer, TransformerLMHead
from smp_cases.models import FAMILIES, batch, loss_of, part_of, tiny
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

TOLERANCE = 1e-5


@contextlib.contextmanager
def initialized(**config):
    tsm.init(config)
    try:
        yield
    finally:
        tsm.state.reset()


class Collectives:
    """Counts calls of torch.distributed's collectives by name.

    CommDebugMode is unsuitable: its backward hooks give each module a separate input, and it does not observe
    backends written in Python.
    """

    NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather")

    def __enter__(self):
        self.counts = {}
        self.kept = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.kept.items():
            setattr(dist, name, functools.partial(self._counted, name, function))
        return self

    def _counted(self, name, function, *args, **kwargs):
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **kwargs)

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(plain, model):
    """The largest difference of any gradient, the model's gathered; names must be the same."""
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    found = translate_state_dict_to_hf(model, found)
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    return max((wanted[name] - found[name]).abs().max().item() for name in wanted)


def assert_trains_as_plain(family, counts=True, **overrides):
    """One forward and backward; ``counts``: of exactly the budget's collectives."""
    config = overrides.pop("transform", None)
    plain, model = tiny(family, **overrides), tiny(family, **overrides)
    model = tsm.transform(model, config=config)
    ids = batch(0)
    wanted = loss_of(plain, ids)
    wanted.backward()
    with Collectives() as forward:
        loss = loss_of(model, ids)
    with Collectives() as backward:
        loss.backward()
    assert abs(loss.item() - wanted.item()) < TOLERANCE, (family, loss, wanted)
    difference = differences(plain, model)
    assert difference < TOLERANCE, (family, overrides, difference)
    for parameter in model.parameters():
        if parameter.placements[0].is_replicate():  # held whole: the same on every rank
            mine = parameter.grad.to_local()
            of_first = mine.clone()
            group = tsm.state.tp_process_group
            dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
            assert torch.equal(of_first, mine)
    if counts:
        # Two per layer each way; a tied embedding one forward, the head one all-gather and one back.
        layers, embedding = 2, plain.config.tie_word_embeddings
        assert forward.counts == {"all_reduce": 2 * layers + embedding, "all_gather_into_tensor": 1}, (
            family,
            forward.counts,
        )
        assert backward.counts == {"all_reduce": 2 * layers + 1}, (family, backward.counts)
    return plain, model


def case_every_family_at_2_trains_as_plain_within_the_budget():
    for family in FAMILIES:
        with initialized(tensor_parallel_degree=2, tensor_parallel_checks=0):
            assert_trains_as_plain(family)


def case_every_family_at_4_trains_as_plain_within_the_budget():
    for family in FAMILIES:
        with initialized(tensor_parallel_degree=4, tensor_parallel_checks=0):
            assert_trains_as_plain(family)


def case_variants_of_families_train_as_plain():
    variants = [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        # Two heads a rank at 4; each rank's heads use key and value heads unevenly.
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}),
        ("qwen", {"num_key_value_heads": 1}),
        ("phi", {"qk_layernorm": True}),
        ("phi", {"num_key_value_heads": 2}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
        ("falcon", {"multi_query": False, "bias": True}),
        ("falcon", {"multi_query": True, "parallel_attn": False, "bias": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("llama", {"attn_implementation": "eager"}),
        ("gpt2", {"attn_implementation": "eager"}),
    ]
    for degree in (2, 4):
        for family, overrides in variants:
            with initialized(tensor_parallel_degree=degree, tensor_parallel_checks=0):
                assert_trains_as_plain(family, **overrides)


def case_an_activation_function_that_learns_has_the_plain_gradients():
    if hasattr(transformers, "ApertusConfig"):
        for degree in (2, 4):
            with initialized(tensor_parallel_degree=degree):
                # In transformers 4.57 the family's plan gathers inside blocks.
                assert_trains_as_plain("apertus", counts=False)


def case_stacked_and_listed_experts_are_distinguished():
    # Transformers 4.57 has no plan for this family.
    if hf.plan_of(tiny("granitemoe")).keys() - {"lm_head"}:
        with initialized(tensor_parallel_degree=2):
            assert_trains_as_plain("granitemoe", counts=False)


def case_an_indivisible_vocabulary_is_replicated_with_a_warning():
    import warnings

    for family in ("llama", "gemma"):
        with initialized(tensor_parallel_degree=4), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, model = assert_trains_as_plain(family, counts=False, vocab_size=97)
            assert "97 rows do not divide by tensor_parallel_degree=4" in "".join(str(w.message) for w in caught)
            assert model.lm_head.weight.shape == (97, 32)
            tied = model.lm_head.weight is model.get_input_embeddings().weight
            assert tied == (family == "gemma")


# ---- with FSDP ----


def wrapped(model, engine, **more):
    layers = {TETransformerLayer}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
    options = {"auto_wrap_policy": policy, "device_id": torch.device("cpu"), **more}
    mesh = tsm.state.mesh["replicate", "shard"]
    if engine == "fsdp1":
        return FSDP(model, use_orig_params=True, **options)
    if engine == "fsdp1_flat":
        return FSDP(model, use_orig_params=False, **options)
    if engine == "fsdp1_hybrid":
        strategy = ShardingStrategy.HYBRID_SHARD
        return FSDP(model, use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh, **options)
    for module in [module for module in model.modules() if isinstance(module, TETransformerLayer)]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def values(model):
    """Every parameter, whole, under Hugging Face's names and in its layout."""
    with FSDP.summon_full_params(model) if isinstance(model, FSDP) else contextlib.nullcontext():
        found = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
        found = {name: whole(value).clone() for name, value in found.items()}
        return translate_state_dict_to_hf(model, found)


@functools.cache
def plain_training(family, steps=2):
    """Losses and final parameters of one process on whole batches."""
    model = tiny(family)
    return _train(model, steps, lambda ids: ids), values(model)


def _train(model, steps, part):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, part(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_composes(family, engine, config=None):
    model = wrapped(tsm.transform(tiny(family), config=config), engine)
    rank, size = tsm.state.dp_rank, tsm.state.dp_size
    found = _train(model, 2, lambda ids: part_of(ids, rank, size))
    mean = torch.tensor(found)
    dist.all_reduce(mean)
    wanted, parameters = plain_training(family)
    assert torch.allclose(mean / dist.get_world_size(), torch.tensor(wanted), atol=TOLERANCE), (mean, wanted)
    # The learning rate is 1: what parameters moved is what gradients were.
    found = values(model)
    assert found.keys() >= parameters.keys(), parameters.keys() - found.keys()
    # A tied head may be there under its own name besides.
    for name in parameters:
        difference = (found[name] - parameters[name]).abs().max().item()
        assert difference < TOLERANCE, (family, engine, name, difference)


def _compose(engine, *families, shard=2):
    for family in families:
        with initialized(tensor_parallel_degree=2, hybrid_shard_degree=shard):
            assert_composes(family, engine)


def case_with_fsdp1():
    _compose("fsdp1", "llama", "gpt2", "falcon", "gemma", "mixtral")
    _compose("fsdp1", "gpt2", "falcon", shard=1)


def case_with_fsdp1_flat_parameters():
    _compose("fsdp1_flat", "llama", "gpt2", "falcon", "gemma", "mixtral")
    _compose("fsdp1_flat", "gpt2", "falcon", shard=1)


def case_with_fsdp1_hybrid_on_the_mesh():
    for family in ("llama", "gpt2"):
        with initialized(tensor_parallel_degree=2, hybrid_shard_degree=2):
            assert_composes(family, "fsdp1_hybrid")


def case_with_fsdp2():
    _compose("fsdp2", "llama", "gpt2", "falcon")


def case_with_fsdp2_tied_experts_and_replicas():
    _compose("fsdp2", "gemma", "mixtral")
    _compose("fsdp2", "gpt2", shard=1)


def case_with_every_engine_at_4():
    for engine in ("fsdp1", "fsdp1_flat", "fsdp2"):
        with initialized(tensor_parallel_degree=4, hybrid_shard_degree=1):
            assert_composes("llama", engine)


def case_frozen_parameters_are_unchanged():
    def frozen(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "norm" in name)
        return model

    plain, before = frozen(tiny()), values(tiny())
    losses = _train(plain, 2, lambda ids: ids)
    wanted = values(plain)
    for shard in (1, 2):
        for engine in ("fsdp1", "fsdp2"):
            with initialized(tensor_parallel_degree=2, hybrid_shard_degree=shard):
                model = wrapped(tsm.transform(frozen(tiny())), engine)
                found = _train(model, 2, lambda ids: part_of(ids, tsm.state.dp_rank, tsm.state.dp_size))
                mean = torch.tensor(found)
                dist.all_reduce(mean)
                assert torch.allclose(mean / dist.get_world_size(), torch.tensor(losses), atol=TOLERANCE)
                for name, value in values(model).items():
                    if "q_proj" in name or "norm" in name:
                        assert (value - wanted[name]).abs().max() < TOLERANCE, (shard, engine, name)
                    else:
                        assert torch.equal(value, before[name]), (shard, engine, name)


def case_gradients_accumulate_without_communication():
    plain = tiny()
    for step in range(2):
        loss_of(plain, batch(step)).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    wanted = values(plain)
    for shard in (1, 2):
        with initialized(tensor_parallel_degree=2, hybrid_shard_degree=shard):
            for low in (False, True):
                precision = MixedPrecision(torch.bfloat16, torch.float32) if low else None
                model = wrapped(tsm.transform(tiny()), "fsdp1", mixed_precision=precision)
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                for step in range(2):
                    ids = part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size)
                    with contextlib.nullcontext() if step else model.no_sync():
                        loss_of(model, ids).backward()
                optimizer.step()
                for name, value in values(model).items():
                    difference = (value - wanted[name]).abs().max().item()
                    assert difference < (0.05 if low else TOLERANCE), (shard, low, name, difference)


# ---- meta models, dtypes, copies ----


def case_a_meta_model_stays_on_meta_and_takes_a_state_dict():
    for family in ("llama", "gpt2", "falcon", "mixtral"):
        with initialized(tensor_parallel_degree=4):
            with torch.device("meta"):
                model = tsm.transform(tiny(family), device="cpu")
            assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
            plain = tiny(family)
            built = tsm.transform(tiny(family))
            theirs = plain.state_dict()
            ours = translate_hf_state_dict(built, theirs)
            assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
                name: tensor.shape for name, tensor in ours.items()
            }
            back = translate_state_dict_to_hf(built, ours)
            assert set(back) == set(theirs)
            for name, tensor in theirs.items():
                assert torch.equal(back[name], tensor)
            for name, parameter in built.named_parameters():
                assert torch.equal(whole(parameter), ours[name]), name
            if family in ("llama", "mixtral"):
                identical = family == "llama" or "experts.0" in "".join(theirs)
                assert identical == all(ours[name] is tensor for name, tensor in theirs.items())


def case_dtype_applies_to_parameters_and_not_to_buffers():
    with initialized(tensor_parallel_degree=2):
        model = tsm.transform(tiny(), dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert loss_of(model, batch(0)).isfinite()


def case_layers_have_the_class_that_scripts_expect_at_every_degree():
    for degree in (1, 2):
        for family in FAMILIES:
            with initialized(tensor_parallel_degree=degree):
                plain, model = tiny(family), tiny(family)
                names = set(plain._no_split_modules)
                layers = [name for name, module in plain.named_modules() if type(module).__name__ in names]
                assert tsm.transform(model) is model and len(layers) == 2, family
                found = [name for name, module in model.named_modules() if isinstance(module, TransformerLayer)]
                assert found == layers
                for name in layers:
                    layer, was = model.get_submodule(name), type(plain.get_submodule(name))
                    assert isinstance(layer, (TETransformerLayer, was)) and isinstance(layer, was)
                    assert type(layer).__name__ == was.__name__
                assert isinstance(model, TransformerLMHead) and isinstance(model, type(plain))
                assert type(model).__name__ == type(plain).__name__ and model.config is not None


def case_copies_and_pickles_work_and_are_independent():
    with initialized(tensor_parallel_degree=2):
        model = tsm.transform(tiny())
        ids = batch(0)
        wanted = loss_of(model, ids)
        layer = model.model.layers[0]
        again = pickle.loads(pickle.dumps(layer))
        assert [type(m) for m in again.modules()] == [type(m) for m in layer.modules()]
        for a, b in zip(again.parameters(), layer.parameters(), strict=True):
            assert a is not b and torch.equal(whole(a), whole(b))
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(loss_of(other, ids), wanted)


def case_generation_matches_the_plain_model():
    for family in ("llama", "gpt2", "falcon", "mixtral"):
        with initialized(tensor_parallel_degree=4):
            plain, model = tiny(family).eval(), tsm.transform(tiny(family).eval())
            ids = batch(0)[:2]
            options = {"max_new_tokens": 5, "do_sample": False}
            assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options)), family


def case_different_models_are_replaced_by_the_first_ranks_model():
    with initialized(tensor_parallel_degree=2):
        model = tiny()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(dist.get_rank() % 2)
        model = tsm.transform(model)
        plain = tiny()
        wanted = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), wanted[name]), name


# ---- a user's own module ----


class Mine(torch.nn.Module):
    """Two projections with a dropout inside the region and a norm outside, without transformers."""

    def __init__(self, dropout=0.0, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList([MyBlock(dropout, width) for _ in range(2)])
        self.head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MyBlock(torch.nn.Module):
    def __init__(self, dropout, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, width)
        self.gate = torch.nn.Linear(16, width)
        self.dropout = torch.nn.Dropout(dropout)
        self.down = torch.nn.Linear(width, 16)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.dropout(torch.relu(self.gate(y)) * self.up(y)))


MY_PLAN = {"blocks.*.up": "colwise", "blocks.*.gate": "colwise", "blocks.*.down": "rowwise"}


def mine(**options):
    torch.manual_seed(0)
    return Mine(**options)


def case_a_users_plan_works_for_any_module():
    ids = batch(0) % 32

    class WithPlan(Mine):
        _tp_plan = MY_PLAN

    for plan in (MY_PLAN, {**MY_PLAN, "embed": "embedding_rowwise", "head": "colwise_gather_output"}, None):
        with initialized(tensor_parallel_degree=4):
            plain = mine()
            torch.manual_seed(0)
            model = WithPlan() if plan is None else Mine()
            model = tsm.transform(model, config=plan and {"tp_plan": plan})
            plain(ids).square().mean().backward()
            model(ids).square().mean().backward()
            assert differences(plain, model) < TOLERANCE
            assert len([m for m in model.modules() if isinstance(m, TransformerLayer)]) == 2


# ---- random numbers ----


def case_dropout_outside_regions_matches_the_plain_model():
    dropouts = {
        "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2},
        "phi": {"resid_pdrop": 0.2, "embd_pdrop": 0.2},
        "gpt_neox": {"hidden_dropout": 0.2},
        "falcon": {"hidden_dropout": 0.2},
    }
    for family, options in dropouts.items():
        with initialized(tensor_parallel_degree=4):
            plain, model = tiny(family, **options).train(), tsm.transform(tiny(family, **options)).train()
            for step in range(2):
                torch.manual_seed(step)
                wanted = loss_of(plain, batch(step))
                torch.manual_seed(step)
                found = loss_of(model, batch(step))
                assert abs(found.item() - wanted.item()) < TOLERANCE, (family, found, wanted)


def case_dropout_inside_regions_differs_by_rank_and_repeats_when_recomputed():
    from torch.utils.checkpoint import checkpoint

    masks = []

    class Recording(torch.nn.Dropout):
        def forward(self, x):
            y = super().forward(x)
            masks.append((y != 0).detach().clone())
            return y

    with initialized(tensor_parallel_degree=4):
        model = mine(dropout=0.5, width=256)
        for block in model.blocks:
            block.dropout = Recording(0.5)
            torch.nn.init.constant_(block.gate.bias, 10.0)  # nothing is zero but by dropout
            torch.nn.init.constant_(block.up.bias, 10.0)
        model = tsm.transform(model, config={"tp_plan": MY_PLAN}).train()
        ids = batch(0)[:2] % 32
        x = model.embed(ids)
        before = torch.get_rng_state()
        first = model.blocks[1](model.blocks[0](x))
        after = torch.get_rng_state()
        assert not torch.equal(before, after)
        # Each layer and each rank draws different numbers; the default states remain equal on all ranks.
        assert not torch.equal(masks[0], masks[1])
        others = [torch.empty_like(masks[0].float()) for _ in range(4)]
        dist.all_gather(others, masks[0].float())
        assert all(not torch.equal(others[0], other) for other in others[1:])
        states = [torch.empty_like(after) for _ in range(4)]
        dist.all_gather(states, after)
        assert all(torch.equal(states[0], other) for other in states)
        torch.set_rng_state(before)
        assert torch.equal(model.blocks[1](model.blocks[0](x)), first)
        masks.clear()
        for reentrant in (True, False):
            y = checkpoint(model.blocks[0], x, use_reentrant=reentrant)
            y.sum().backward(retain_graph=True)
            assert torch.equal(masks[-1], masks[-2]), reentrant


def case_checkpointed_layers_have_the_plain_gradients():
    for reentrant in (True, False):
        for family in ("llama", "falcon", "mixtral"):
            with initialized(tensor_parallel_degree=4):
                overrides = {"num_key_value_heads": 1} if family == "llama" else {}
                plain, model = tiny(family, **overrides), tsm.transform(tiny(family, **overrides))
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.train()
                loss_of(plain, batch(0)).backward()
                loss_of(model, batch(0)).backward()
                assert differences(plain, model) < TOLERANCE, (family, reentrant)


# ---- sequence parallelism ----


def case_sequence_parallel_trains_as_plain():
    for degree in (2, 4):
        for family, options in (
            ("llama", {}),
            ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
            ("mistral", {}),
            ("qwen", {}),
            ("gemma", {}),
            ("phi", {}),
        ):
            with initialized(tensor_parallel_degree=degree, tensor_parallel_checks=0):
                sharded = {"sequence_parallel": True}
                _, model = assert_trains_as_plain(family, counts=False, transform=sharded, **options)
                seen = []
                model.model.layers[0].mlp.register_forward_hook(lambda m, args, y, seen=seen: seen.append(y.shape[1]))
                with Collectives() as forward:
                    loss = loss_of(model, batch(0))
                with Collectives() as backward:
                    loss.backward()
                tied = model.config.tie_word_embeddings
                assert seen == [batch(0).shape[1] // degree]
                # Two of each per layer; whole again after the last layer; the head's own.
                assert forward.counts == {
                    "all_gather_into_tensor": 2 * 2 + 2,
                    "reduce_scatter_tensor": 2 * 2,
                    **({"all_reduce": 1} if tied else {}),
                }, forward.counts
                repeated = model.config.num_key_value_heads < degree
                assert backward.counts == {
                    "all_gather_into_tensor": 2 * 2 + 1,
                    "reduce_scatter_tensor": 2 * 2,
                    "all_reduce": 2 + 1 + 2 * repeated,
                }, backward.counts


def case_sequence_parallel_composes():
    for engine in ("fsdp1", "fsdp2"):
        with initialized(tensor_parallel_degree=2, hybrid_shard_degree=2):
            assert_composes("llama", engine, config={"sequence_parallel": True})


def case_sequence_parallel_rejects_unsupported_models():
    with initialized(tensor_parallel_degree=4):
        for family in ("gpt2", "mixtral"):
            with refused("not known to work on a part of the sequence", kind=NotImplementedError):
                tsm.transform(tiny(family), config={"sequence_parallel": True})
        model = tsm.transform(tiny(), config={"sequence_parallel": True})
        with refused("a sequence of 10 does not divide by tensor_parallel_degree=4: pad it to 12"):
            model(batch(0)[:, :10])


def case_sequence_parallel_generates_the_plain_models_tokens():
    for options in ({}, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}):
        with initialized(tensor_parallel_degree=4):
            plain, model = tiny(**options).eval(), tsm.transform(tiny(**options), config={"sequence_parallel": True})
            ids, much = batch(0)[:2], {"max_new_tokens": 5, "do_sample": False}
            loss = loss_of(model, ids)
            assert torch.equal(model.eval().generate(ids, **much), plain.generate(ids, **much))
            # Gradients of sharded inputs are sharded.
            loss.backward()
            loss_of(plain, ids).backward()
            assert differences(plain, model) < TOLERANCE


def case_sequence_parallel_dropout_differs_by_rank():
    with initialized(tensor_parallel_degree=4):
        model = tsm.transform(tiny("phi", resid_pdrop=0.5), config={"sequence_parallel": True}).train()
        masks = []
        for layer in model.model.layers:
            layer.resid_dropout.register_forward_hook(lambda m, args, y: masks.append((y != 0).float()))
        loss_of(model, batch(0)).backward()
        others = [torch.empty_like(masks[0]) for _ in range(4)]
        dist.all_gather(others, masks[0].contiguous())
        assert all(not torch.equal(others[0], other) for other in others[1:])
