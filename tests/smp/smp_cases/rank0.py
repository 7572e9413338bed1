"""transform(load_state_dict_from_rank0=True): rank 0's values reach every rank, and only where they belong."""

import contextlib

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smddp.sagemaker import rank0
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from smp_cases.delayed_param import assert_trains, on_meta
from smp_cases.hybrid import wrap1, wrap2
from smp_cases.models import tiny
from torch.distributed.tensor import DTensor

FAMILIES = ("llama", "gpt2", "falcon", "gemma")


def loaded(family: str) -> torch.nn.Module:
    """Rank 0 has the model, the others its shape."""
    model = tiny(family) if dist.get_rank() == 0 else on_meta(family)
    return tsm.transform(model, load_state_dict_from_rank0=True)


def assert_whole(model: torch.nn.Module, family: str) -> None:
    """The gathered values are rank 0's, under their original names."""
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    found = translate_state_dict_to_hf(model, whole)
    wanted = tiny(family).state_dict()
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), (family, name)
    buffers = dict(model.named_buffers())
    for name, value in tiny(family).named_buffers():
        assert torch.equal(buffers[name], value), (family, name)


@contextlib.contextmanager
def config(degree: int, tensor: int):
    tsm.init({"hybrid_shard_degree": degree, "tensor_parallel_degree": tensor})
    try:
        yield
    finally:
        tsm.state.reset()


def case_load_sets_only_the_shards_of_rank_zeros_tensor_group():
    for degree, tensor in ((2, 2), (1, 2), (1, 4), (4, 1)):
        with config(degree, tensor):
            for family in FAMILIES if tensor < 4 else ("llama", "gpt2"):
                model = loaded(family)
                everything = [*model.parameters(), *model.buffers()]
                first = dist.get_rank() < tensor
                assert all(t.is_meta != first for t in everything), (degree, tensor, family, dist.get_rank())
                if first:
                    assert_whole(model, family)


def case_fsdp2_has_rank_zeros_values_everywhere():
    for degree, tensor in ((2, 2), (1, 2), (2, 1), (4, 1)):
        with config(degree, tensor):
            for family in FAMILIES:
                model = loaded(family)
                values = rank0.take(model)
                assert all(p.is_meta for p in model.parameters())
                assert (values is None) == bool(tsm.state.rep_rank or tsm.state.shard_rank)
                if hasattr(model, "model"):
                    wrap2(model)
                else:
                    torch.distributed.fsdp.fully_shard(model)
                rank0.spread(model, values)
                assert_whole(model, family)
                assert_trains(model, tiny(family), f"{family} {degree} x {tensor}")


def case_fsdp1_on_cpus_has_rank_zeros_values_everywhere():
    for degree, tensor in ((2, 2), (4, 1), (1, 2)):
        with config(degree, tensor):
            model = rank0.spread(loaded("llama"))
            assert_whole(model, "llama")
            assert_trains(wrap1(model), tiny("llama"), f"{degree} x {tensor}")


def case_mismatched_values_raise_on_every_rank():
    def fails(text: str, call) -> None:
        with refused(text):
            call()

    with config(2, 2):
        first = dist.get_rank() == 0
        source = tiny().state_dict()
        without = {name: value for name, value in source.items() if name != "model.norm.weight"}
        for text, given in (
            ("no state dict", None),
            ("lacks model.norm.weight", without),
            ("has more", {**source, "more": torch.ones(1)}),
            ("shapes", {**source, "model.norm.weight": torch.ones(3)}),
            ("on meta", on_meta().state_dict()),
        ):
            fails(text, lambda given=given: rank0.load(on_meta(), given if first else None))
        fails("load() first", lambda: rank0.spread(on_meta()))
        fails("take() them", lambda: rank0.spread(wrap2(loaded("llama"))))
