"""`smddp.experimental.overlap_fsdp`: overlap of FSDP2's collectives with computation on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND
from smddp import experimental
from smddp.experimental import fsdp_overlap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="custom collectives in FSDP2 need torch 2.9"
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(33, 33)
        self.before: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before()
        if self.in_backward is not None:
            x = _CallInBackward.apply(x, self.in_backward)
        return torch.tanh(self.work(x))


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.begin = nn.Linear(7, 33)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean()


def _sharded(overlapped: bool, layers: int = 4, **options: Any) -> Model:
    model = Model(layers)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if overlapped:
        experimental.overlap_fsdp(model)
    return model


def _trained(model: Model, backwards: int = 1) -> list[Tensor]:
    """Returns losses, gradients and parameters of three steps."""
    values: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(3):
        for part in range(backwards):
            torch.manual_seed(100 * dist.get_rank() + 10 * step + part)
            loss = model(torch.randn(5, 7))
            loss.backward()
            values.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        values += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return values + [p.to_local().detach().clone() for p in model.parameters()]


class Deferred:
    """Counts the overlapped gradients, and records the reasons of the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: list[str | None] = []
        asked = fsdp_overlap._reader
        monkeypatch.setattr(
            fsdp_overlap, "_reader", lambda *call: self.reasons.append(asked(*call)) or self.reasons[-1]
        )


@on_ranks(3)
def test_values_equal_those_of_plain_fsdp_for_all_readers_of_gradients():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def frozen(model: Model) -> None:
        model.layers[1].requires_grad_(False)

    def checkpointed(model: Model) -> None:
        model.checkpointed = True

    def hooked(model: Model) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))

    def summed(model: Model) -> None:
        for module in (model, *model.layers):
            module.set_reduce_scatter_divide_factor(5.0)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    size = dist.get_world_size()
    copies = init_device_mesh("cpu", (1, size), mesh_dim_names=("copies", "shards"))
    ways: list[tuple[str, str | None, dict[str, Any], int, Callable[[Model], None] | None]] = [
        ("plain", None, {}, 1, None),
        ("kept whole", None, {"reshard_after_forward": False}, 1, None),
        ("frozen unit", None, {}, 1, frozen),
        ("checkpointed", None, {}, 1, checkpointed),
        ("a factor", None, {}, 1, summed),
        ("added up", "they are added", {}, 2, None),
        ("converted", "they are converted", {"mp_policy": half}, 1, None),
        ("hooked", "a hook of a parameter", {}, 1, hooked),
        ("two dimensions", "a second dimension", {"mesh": copies}, 1, None),
    ]
    for name, reason, options, backwards, change in ways:
        results = []
        for overlapped in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                seen = Deferred(patch)
                model = _sharded(overlapped, **options)
                if change is not None:
                    change(model)
                results.append(_trained(model, backwards))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
        assert any(reason in (r or "") if reason else r is None for r in seen.reasons), (name, seen.reasons)


def _meet(name: str) -> None:
    """Rank 1 continues after rank 0 has passed this point."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(name, "here")
    else:
        store.wait([name], timedelta(seconds=20))


@on_ranks(2)
def test_gradients_are_reduced_during_backward():
    """Rank 1 contributes the last layer's gradients only after rank 0 is in the backward of the layer before."""
    model = _sharded(True)
    model(torch.ones(5, 7)).backward()  # FSDP2 records the order of the units
    name = f"overlapping {time.monotonic_ns()}" if dist.get_rank() == 0 else ""
    names = [name]
    dist.broadcast_object_list(names)
    model.zero_grad()
    met = []

    def here() -> None:
        met.append(_meet(names[0]))

    model.layers[2 if dist.get_rank() == 0 else 3].in_backward = here
    model(torch.ones(5, 7)).backward()
    assert len(met) == 1


@on_ranks(2)
def test_the_next_unit_is_gathered_while_one_computes():
    model = _sharded(True)
    following = fsdp_overlap.fsdp_groups(model.layers[2])[0]
    seen = []

    def before() -> None:
        deadline = time.monotonic() + 20
        work = following._all_gather_result.all_gather_work
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(work.is_completed())

    model.layers[1].before = before
    model(torch.ones(5, 7)).backward()
    assert seen == [True]


@on_ranks(2)
def test_errors_of_collectives_are_raised_by_backward():
    if BACKEND != "smddp":
        pytest.skip("other backends wait for their deadline")
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    mesh = type(mesh).from_group(group, "cpu")
    model = _sharded(True, layers=1, mesh=mesh, reshard_after_forward=False)
    loss = model(torch.ones(5, 7))
    if dist.get_rank() == 0:
        with pytest.raises(smddp.MismatchError, match=r"reduce_scatter.*all_reduce"):
            loss.backward()
    else:
        with pytest.raises(smddp.MismatchError, match=r"all_reduce.*reduce_scatter"):
            dist.all_reduce(torch.ones(3), group=group)


@on_ranks(2)
def test_models_that_have_no_fsdp2_are_refused():
    with pytest.raises(TypeError, match="fully_shard was not called for this Linear"):
        experimental.overlap_fsdp(nn.Linear(2, 2))
