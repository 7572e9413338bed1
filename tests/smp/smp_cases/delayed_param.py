"""Delayed parameter initialization: the same values everywhere, no more memory than a shard and a unit."""

import contextlib
import functools
import weakref

import smddp.sagemaker as tsm
import torch
from ranks.errors import refused
from smddp.sagemaker.delayed_param import DelayedParamIniter
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from smp_cases.models import batch, config, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
# Families with different storage layouts, ties and reductions under tensor parallelism: (family, tie_word_embeddings).
FAMILIES = (("llama", False), ("gpt2", True), ("falcon", False), ("gemma", True), ("mixtral", False))


def on_meta(family: str = "llama", **overrides) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(family, **overrides))


@functools.cache
def alone(family: str = "llama", **overrides) -> torch.nn.Module:
    """Returns the model as initialised in one process."""
    return DelayedParamIniter(on_meta(family, **overrides), device="cpu").materialize()


def layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def wrap1(model: torch.nn.Module, **options) -> FSDP:
    """FSDP1 with delayed initialization, one unit per layer."""
    delayed = DelayedParamIniter(model, device="cpu")
    units = set(layers(model))
    with delayed.validate_params_and_buffers_inited():
        return FSDP(
            model,
            auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m in units),
            device_id=CPU,
            param_init_fn=delayed.get_param_init_fn(),
            post_param_init_fn=delayed.get_post_param_init_fn(),
            **options,
        )


def wrap2(model: torch.nn.Module, mesh=None) -> torch.nn.Module:
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def delayed2(model: torch.nn.Module, mesh=None, before: bool = True, emptied: bool = False) -> torch.nn.Module:
    """FSDP2 with delayed initialization; the initialiser made before or after, memory by it or by to_empty."""
    delayed = DelayedParamIniter(model, device="cpu") if before else None
    model = wrap2(model, mesh)
    delayed = delayed or DelayedParamIniter(model, device="cpu")
    if emptied:
        model.to_empty(device="cpu")
    with delayed.validate_params_and_buffers_inited():
        return delayed.materialize(model)


def assert_same(model: torch.nn.Module, expected: torch.nn.Module, what: str) -> None:
    """Gathered parameters and buffers, bit for bit, under the names of the plain model."""
    summoned = FSDP.summon_full_params(model, writeback=False) if isinstance(model, FSDP) else contextlib.nullcontext()
    with summoned, torch.no_grad():
        found = {}
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            name = name.replace("_fsdp_wrapped_module.", "")
            found[name] = value.full_tensor() if isinstance(value, DTensor) else value
        found = translate_state_dict_to_hf(model, found)
        wanted = dict([*expected.named_parameters(), *expected.named_buffers()])
        assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (what, name, found[name], value)


def assert_trains(model: torch.nn.Module, expected: torch.nn.Module, what: str) -> None:
    """The forward pass finds its buffers and tied weights, and backward reaches the parameters."""
    loss = loss_of(model, batch(0))
    with torch.no_grad():
        wanted = loss_of(expected, batch(0))
    assert abs(float(loss.detach()) - float(wanted)) < 1e-5, (what, loss, wanted)
    loss.backward()


def case_fsdp1_has_the_values_of_one_process():
    flat, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for family in ("llama", "gpt2"):
        expected = alone(family)
        for original in (True, False):
            for strategy, mesh in (
                (ShardingStrategy.FULL_SHARD, flat),
                (ShardingStrategy.HYBRID_SHARD, pairs),
                (ShardingStrategy.NO_SHARD, flat),
            ):
                what = f"{family} {strategy} use_orig_params={original}"
                model = wrap1(on_meta(family), sharding_strategy=strategy, device_mesh=mesh, use_orig_params=original)
                assert_trains(model, expected, what)
                assert_same(model, expected, what)


def case_fsdp2_has_the_values_of_one_process():
    names = ("replicate", "shard")
    meshes = [init_device_mesh("cpu", (4,))]
    meshes += [init_device_mesh("cpu", sizes, mesh_dim_names=names) for sizes in ((2, 2), (4, 1))]
    for mesh in meshes:
        for before, emptied in ((True, False), (False, False), (True, True)):
            what = f"{mesh} initialiser made {'before' if before else 'after'} fully_shard, to_empty {emptied}"
            model = delayed2(on_meta("gpt2"), mesh, before, emptied)
            assert_same(model, alone("gpt2"), what)
            assert_trains(model, alone("gpt2"), what)


MORE_FAMILIES = ("mistral", "mixtral", "qwen", "gpt_neox", "gemma", "phi", "falcon")


def case_every_family_under_fsdp2_has_the_values_of_one_process():
    for index, family in enumerate(MORE_FAMILIES):
        tied = index % 2 == 0
        model = delayed2(on_meta(family, tie_word_embeddings=tied))
        assert_same(model, alone(family, tie_word_embeddings=tied), f"{family} tied={tied}")


def case_every_family_under_fsdp1_has_the_values_of_one_process():
    for index, family in enumerate(MORE_FAMILIES):
        tied = index % 2 == 1
        expected = alone(family, tie_word_embeddings=tied)
        model = wrap1(on_meta(family, tie_word_embeddings=tied), use_orig_params=tied)
        assert_trains(model, expected, f"{family} tied={tied}")
        assert_same(model, expected, f"{family} tied={tied}")


@contextlib.contextmanager
def degrees(degree: int, tensor: int):
    tsm.init({"hybrid_shard_degree": degree, "tensor_parallel_degree": tensor})
    try:
        yield f"degree {degree} x {tensor}"
    finally:
        tsm.state.reset()


def case_tensor_parallel_shards_are_cut_from_the_values_of_one_process():
    for tensor, families in ((2, FAMILIES), (4, (("llama", False), ("gpt2", True)))):
        with degrees(1, tensor) as what:
            for family, tied in families:
                expected = alone(family, tie_word_embeddings=tied)
                model = tsm.transform(on_meta(family, tie_word_embeddings=tied))
                delayed = DelayedParamIniter(model)
                with delayed.validate_params_and_buffers_inited():
                    delayed.materialize()
                assert_same(model, expected, f"{family} {what}")
                assert_trains(model, expected, f"{family} {what}")


def case_tensor_parallelism_with_fsdp2_has_the_values_of_one_process():
    for degree, families in ((2, FAMILIES), (1, (("gpt2", True),))):
        with degrees(degree, 2) as what:
            for family, tied in families:
                model = delayed2(tsm.transform(on_meta(family, tie_word_embeddings=tied)))
                assert_same(model, alone(family, tie_word_embeddings=tied), f"{family} {what}")
                assert_trains(model, alone(family, tie_word_embeddings=tied), f"{family} {what}")


def case_tensor_parallelism_with_fsdp1_has_the_values_of_one_process():
    for degree, originals in ((2, (True, False)), (1, (True,))):
        with degrees(degree, 2) as what:
            for family, tied in FAMILIES:
                for original in originals if family == "llama" else originals[:1]:
                    model = tsm.transform(on_meta(family, tie_word_embeddings=tied))
                    model = wrap1(model, use_orig_params=original)
                    expected = alone(family, tie_word_embeddings=tied)
                    assert_trains(model, expected, f"{family} {what} use_orig_params={original}")


def case_the_configured_seed_gives_the_values():
    expected = DelayedParamIniter(on_meta(), random_seed=7, device="cpu").materialize()
    assert not torch.equal(expected.lm_head.weight, alone().lm_head.weight)
    tsm.init({"random_seed": 7, "hybrid_shard_degree": 2})
    try:
        model = wrap1(on_meta(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        assert_same(model, expected, "random_seed 7")
    finally:
        tsm.state.reset()


class Peak(TorchDispatchMode):
    """Peak bytes of live tensors that were created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def bytes_of(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def case_no_rank_holds_more_than_its_shard_and_one_unit():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}
    whole = on_meta(**sizes)
    unit = max(bytes_of(layers(whole)[0]), bytes_of(whole.model.embed_tokens) + bytes_of(whole.lm_head))
    everything = bytes_of(whole)
    slack = 64 * 1024  # buffers, norms, what a flat parameter is padded with
    model = on_meta(**sizes)
    delayed = DelayedParamIniter(model, device="cpu")
    wrap2(model)
    with Peak() as memory:
        delayed.materialize()
    assert memory.peak <= everything / 4 + unit + slack, (memory.peak, everything, unit)
    assert memory.peak > everything / 4, "the tracker sees nothing"

    # FSDP1 itself copies a unit into its flat parameter; the initialisation adds nothing to what that takes.
    def empty(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    mesh = init_device_mesh("cpu", (4,))
    with Peak() as bare:
        model = on_meta(**sizes)
        units = set(layers(model))
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m in units)
        FSDP(model, auto_wrap_policy=policy, device_id=CPU, device_mesh=mesh, param_init_fn=empty)
    with Peak() as memory:
        wrap1(on_meta(**sizes), device_mesh=mesh)
    assert memory.peak <= bare.peak + slack, (memory.peak, bare.peak, everything, unit)


def case_fsdp_arguments_that_cannot_work_are_refused():
    delayed = DelayedParamIniter(on_meta(), device="cpu")
    with refused("get_param_init_fn"):
        FSDP(on_meta(), device_id=CPU, post_param_init_fn=delayed.get_post_param_init_fn())
    # A real model may come with both, and neither is called.
    FSDP(alone(), device_id=CPU, post_param_init_fn=delayed.get_post_param_init_fn())

    # The embedding and its tied weight are in separate units.
    model = on_meta("gpt2", tie_word_embeddings=True)
    delayed = DelayedParamIniter(model, device="cpu")
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m is model.transformer.wte)
    with refused("tied", "lm_head.weight"):
        FSDP(model, auto_wrap_policy=policy, device_id=CPU, param_init_fn=delayed.get_param_init_fn())


def case_the_validator_reports_skipped_modules():
    model = on_meta()
    delayed = DelayedParamIniter(model, device="cpu")
    first = model.model.layers[0]
    try:
        with delayed.validate_params_and_buffers_inited():
            FSDP(first, device_id=CPU, param_init_fn=delayed.get_param_init_fn())
    except RuntimeError as error:
        assert "model.layers.1.mlp.down_proj.weight" in str(error) or "more" in str(error), error
        assert "model.embed_tokens.weight" in str(error) and "model.layers.0" not in str(error), error
    else:
        raise AssertionError("nothing was missed")
