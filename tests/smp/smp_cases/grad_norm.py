"""Gradient-norm clipping gives the norm and the gradients of one process, under every mix of degrees."""

import contextlib
import functools

import smddp.sagemaker as tsm
import torch
from ranks.errors import refused
from smddp.sagemaker.grad_norm import clip_grad_norm_
from smddp.sagemaker.names import plain_name
from smp_cases.hybrid import wrap1, wrap2
from smp_cases.models import batch, loss_of, part_of, tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TYPES = (2.0, 1.0, 3.0, float("inf"))
MAX_NORM = 0.01


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    model.model.embed_tokens.requires_grad_(False)
    return model


@functools.cache
def plain(norm_type: float, freeze: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm in one process, and the parameters after a step of size 1 along the clipped gradients."""
    model = frozen(tiny()) if freeze else tiny()
    loss_of(model, batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
    assert norm > 2 * MAX_NORM
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return float(norm), {name: p.detach() for name, p in model.named_parameters()}


def gathered(model: torch.nn.Module, root: torch.nn.Module) -> dict[str, torch.Tensor]:
    summoned = FSDP.summon_full_params(root, writeback=False) if isinstance(root, FSDP) else contextlib.nullcontext()
    with summoned, torch.no_grad():
        parts = {plain_name(name): p for name, p in model.named_parameters()}
        # Copy: replicated values are views of memory that FSDP1 frees afterwards.
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in parts.items()}


def check(build, what: str, freeze: bool = False, outer=lambda model: model, types=TYPES) -> None:
    for norm_type in types:
        norm, wanted = plain(norm_type, freeze)
        root = build()
        model = outer(root)
        loss_of(model, part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = clip_grad_norm_(model, MAX_NORM, norm_type)
        assert found.shape == () and abs(float(found) - norm) < 1e-5 * norm, (what, norm_type, float(found), norm)
        optimizer.step()
        new = gathered(model, root)
        assert new.keys() == wanted.keys(), (what, new.keys() ^ wanted.keys())
        for name, value in wanted.items():
            torch.testing.assert_close(new[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{what} {n}: {m}")


def _degrees(tensor: int, body) -> None:
    for degree in (1, 2, 4):
        if degree * tensor <= 4:
            tsm.init({"hybrid_shard_degree": degree, "tensor_parallel_degree": tensor})
            try:
                body(degree)
            finally:
                tsm.state.reset()


def case_fsdp1_at_every_degree():
    def body(degree: int) -> None:
        for original in (True, False):
            check(lambda o=original: wrap1(tiny(), use_orig_params=o), f"degree {degree} use_orig_params={original}")

    _degrees(1, body)


def case_fsdp2_at_every_degree():
    _degrees(1, lambda degree: check(lambda: wrap2(tiny()), f"degree {degree}"))


def case_fsdp1_with_tensor_parallelism():
    def body(degree: int) -> None:
        for original in (True, False):
            check(
                lambda o=original: wrap1(tsm.transform(tiny()), use_orig_params=o),
                f"degree {degree} x 2 use_orig_params={original}",
                types=(2.0, float("inf")),
            )

    _degrees(2, body)


def case_fsdp2_with_tensor_parallelism():
    _degrees(2, lambda degree: check(lambda: wrap2(tsm.transform(tiny())), f"{degree} x 2", types=(2.0, float("inf"))))


def case_tensor_parallelism_alone_and_no_sharding_at_all():
    tsm.init({"hybrid_shard_degree": 1, "tensor_parallel_degree": 4})
    try:
        check(lambda: tsm.transform(tiny(num_key_value_heads=2)), "tensor 4")
    finally:
        tsm.state.reset()


def case_wrapped_roots_and_frozen_parameters():
    tsm.init({"hybrid_shard_degree": 2, "sm_activation_offloading": False})
    try:
        check(lambda: wrap1(tiny(), use_orig_params=True), "offloaded", outer=offload_wrapper, types=(2.0,))
        check(lambda: wrap2(tiny()), "checkpointed", outer=checkpoint_wrapper, types=(2.0,))
        check(lambda: wrap1(frozen(tiny()), use_orig_params=True), "frozen 1", freeze=True, types=(2.0, 1.0))
        check(lambda: wrap2(frozen(tiny())), "frozen 2", freeze=True, types=(2.0, 1.0))
    finally:
        tsm.state.reset()


def case_ranks_without_elements_and_models_without_gradients():
    tsm.init({"hybrid_shard_degree": 4})
    try:
        for wrap in (wrap1, wrap2):
            model = wrap(tiny())
            assert float(clip_grad_norm_(model, 1.0)) == 0.0
        # Three elements over four ranks: the last one holds none of them.
        narrow = _narrow()
        narrow(torch.ones(2, 5)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(narrow.parameters(), 1.0)
        narrow.zero_grad()
        flat = FSDP(_narrow(), use_orig_params=True, device_id=torch.device("cpu"))
        for sharded in (fully_shard(narrow), flat):
            sharded(torch.ones(2, 5)).sum().backward()
            assert abs(float(clip_grad_norm_(sharded, 1.0)) - float(norm)) < 1e-5 * float(norm)
    finally:
        tsm.state.reset()


def _narrow() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1, bias=False))


def case_gradients_that_are_not_reduced_yet_are_refused():
    tsm.init({"hybrid_shard_degree": 2})
    try:
        for original in (True, False):
            model = wrap1(tiny(), use_orig_params=original)
            with model.no_sync():
                loss_of(model, batch(0)).backward()
            with refused("no_sync"):
                clip_grad_norm_(model, 1.0)
    finally:
        tsm.state.reset()
