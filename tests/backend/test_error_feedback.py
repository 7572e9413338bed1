"""Error feedback under DDP and FSDP2: the rounding error of SMDDP_WIRE_FORMAT is added to the next step's gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND
from ranks.pool import Pool, Pools
from smddp import experimental
from smddp.experimental import fsdp_overlap
from smddp.torch.error_feedback.internode import InterNodeReduce, internode_reduce
from smddp.torch.error_feedback.rounding import GROUP, round_off, rounded
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="the setting is smddp's")

# Nodes of the ranks, and formats.
_PLACES = {"apart": ([0, 1], "int8"), "uneven": ([0, 0, 1], "int8,all_gather=f16")}


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[str], Pool]]:
    def make(place: str) -> Pool:
        nodes, formats = _PLACES[place]
        return Pool(len(nodes), lambda rank: {"SMDDP_NODE": f"node{nodes[rank]}", "SMDDP_WIRE_FORMAT": formats})

    with Pools(make) as made:
        yield made.of


_cases: list[tuple[str, str]] = []


def _case(*places: str) -> Any:
    """Decorator: run the function on the ranks of each place. Rank processes import `NAME.case` from this module."""

    def wrap(function: Any) -> Any:
        function.case = function
        _cases.extend((place, function.__name__) for place in places)
        return function

    return wrap


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 151), nn.Tanh(), nn.Linear(151, 150))
    # Column-major, like a channels_last kernel.
    net[0].weight.data = net[0].weight.data.t().contiguous().t()
    return net


def _ddp(feedback: bool, group: Any = None, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """Buckets of about one layer, after the first step in another order than before."""
    model = DistributedDataParallel(_net(), process_group=group, bucket_cap_mb=0.1, **options)
    state = smddp.ErrorFeedback(model) if feedback else None
    if feedback:
        model.register_comm_hook(state, smddp.error_feedback_hook)
    return model, state


def _gradients(model: Any, step: int, parts: int = 1) -> list[Tensor]:
    """Of a step, whose batch comes in parts. Steps are much alike, so that roundings are."""
    for part in range(parts):
        with model.no_sync() if part + 1 < parts else contextlib.nullcontext():
            random = torch.Generator().manual_seed(10 * dist.get_rank() + part)
            model((1 + 0.001 * step) * torch.randn(8, 150, generator=random)).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def _sums(model: Any, steps: range, parts: int = 1, exact: bool = False) -> list[Tensor]:
    total: list[Tensor] = []
    for step in steps:
        with smddp.exact() if exact else contextlib.nullcontext():
            gradients_of_step = [gradient.double() for gradient in _gradients(model, step, parts)]
        total = [a + b for a, b in zip(total, gradients_of_step, strict=True)] if total else gradients_of_step
    return total


def _residuals(state: Any) -> list[Tensor]:
    """Returns the residuals, summed over all ranks, in the order of the model's parameters."""
    kept = {name.partition("/")[2]: tensor for name, tensor in state.state_dict().items()}
    together = [kept[name].double() for name, _ in _net().named_parameters()]
    for tensor in together:
        dist.all_reduce(tensor, group=state.process_group)
    return together


def _off(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def _alike(tensors: list[Tensor]) -> bool:
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double()
    least, most = flat.clone(), flat.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


@_case("apart", "uneven")
def local_rounding_equals_the_transfers_rounding() -> None:
    """For any split of blocks into segments. Rounding is idempotent."""
    internode, rank = internode_reduce(None), dist.get_rank()
    for block in (9_000, 12_345, 65_537, 100_000, 200_001):
        random = torch.Generator().manual_seed(block)
        shape = (internode.size, block)
        # One rank of each node contributes, so the node's sum equals its contribution.
        given = torch.randn(shape, generator=random) * torch.exp(3 * torch.randn(shape, generator=random))
        first = rank in (0, internode.size - 1)
        mine = given if first else torch.zeros(shape)
        sent = mine.clone()
        rounding_error = internode.round(sent, None)
        plain, again, exactly = (torch.empty(block) for _ in range(3))
        dist.reduce_scatter_tensor(plain, mine.clone())
        dist.reduce_scatter_tensor(again, sent.clone())
        with smddp.exact():
            dist.reduce_scatter_tensor(exactly, sent.clone())
        assert torch.equal(plain, exactly), block
        assert torch.equal(again, exactly), block
        assert rounding_error.count_nonzero() > 0


@_case("apart", "uneven")
def error_of_the_summed_gradients_is_that_of_one_step() -> None:
    """Without error feedback, rounding errors accumulate. The error of the sum equals the ranks' residuals."""
    steps, few = range(40), range(2)
    exact = _sums(_ddp(False)[0], steps, exact=True)
    plain = _sums(_ddp(False)[0], steps)
    model, state = _ddp(True)
    kept = _sums(model, few)
    once = _off(kept, _sums(_ddp(False)[0], few, exact=True))
    kept = [a + b for a, b in zip(kept, _sums(model, range(2, 40)), strict=True)]
    assert _off(kept, exact) < 2 * once < _off(plain, exact), (_off(kept, exact), once, _off(plain, exact))
    assert _off([a + b for a, b in zip(kept, _residuals(state), strict=True)], exact) < 1e-8 < 0.01 * once
    assert _alike(kept)
    assert "int8 between nodes" in smddp.paths()["reduce_scatter"]


@_case("apart")
def residuals_survive_rebuilt_buckets_and_loading() -> None:
    """With accumulated gradients, a subgroup, buckets as views, and another model with other buckets."""
    group = dist.new_group([0, 1])
    exact = _sums(_ddp(False, group)[0], range(6), 2, exact=True)
    model, state = _ddp(True, group, gradient_as_bucket_view=True)
    first = _sums(model, range(1), 2)  # in the first step's buckets
    first = [a + b for a, b in zip(first, _sums(model, range(1, 3), 2), strict=True)]
    saved = state.state_dict()
    assert set(saved) == {f"rank{dist.get_rank()}/{name}" for name, _ in _net().named_parameters()}
    largest = max(float(tensor.abs().max()) for tensor in saved.values())
    model, state = _ddp(True, group)
    state.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.state_dict().items())
    second = _sums(model, range(3, 6), 2)
    missing = [e - a - b - o for e, a, b, o in zip(exact, first, second, _residuals(state), strict=True)]
    assert max(float(tensor.abs().max()) for tensor in missing) < 1e-8 < 0.01 * largest
    dist.destroy_process_group(group)


@_case("apart", "uneven")
def without_rounding_the_bits_equal_those_of_plain_ddp() -> None:
    """Within `exact` for any residual, in small buckets, and in other types."""

    def same(hooked: Any, steps: range) -> bool:
        plain, _ = _ddp(False)
        ours = [_gradients(hooked, step) for step in steps]
        theirs = [_gradients(plain, step) for step in steps]
        return all(torch.equal(a, b) for some, others in zip(ours, theirs) for a, b in zip(some, others, strict=True))

    model, state = _ddp(True)
    with smddp.exact():
        assert same(model, range(3)) and state.state_dict() == {}
    assert not same(model, range(3))
    before = state.state_dict()
    with smddp.exact():
        assert same(model, range(3))
    after = state.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    results = []
    for hooked in (False, True):
        torch.manual_seed(5)
        for layer in (nn.Linear(60, 60), nn.Linear(200, 200).double()):
            model = DistributedDataParallel(layer)
            if hooked:
                state = smddp.ErrorFeedback(model)
                model.register_comm_hook(state, smddp.error_feedback_hook)
            x = torch.full((3, layer.in_features), 0.1 + dist.get_rank(), dtype=layer.weight.dtype)
            model(x).exp().sum().backward()
            results.append(layer.weight.grad)
            assert not hooked or state.state_dict() == {}
    assert all(torch.equal(a, b) for a, b in zip(results[:2], results[2:], strict=True))


@_case("apart")
def values_that_are_not_finite_have_no_residual() -> None:
    model, state = _ddp(True)
    _gradients(model, 0)
    hook = model.module[0].weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.inf))
    gradients_of_step = _gradients(model, 1)
    hook.remove()
    assert not gradients_of_step[0].isfinite().all() and all(
        gradient.isfinite().all() for gradient in gradients_of_step[2:]
    )
    assert all(tensor.isfinite().all() for tensor in state.state_dict().values())
    assert all(gradient.isfinite().all() for gradient in _gradients(model, 2))


@_case("apart")
def invalid_arguments_raise_before_any_transfer() -> None:
    model, state = _ddp(True)
    _gradients(model, 0)
    saved, rank = state.state_dict(), dist.get_rank()
    calls = internode_reduce(None).comm.sequence()
    with pytest.raises(TypeError, match="expected a module, got int"):
        smddp.ErrorFeedback(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a torch\.distributed group, got str"):
        smddp.ErrorFeedback(model, "world")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differs from the model's DDP group"):
        smddp.ErrorFeedback(model, internode_reduce(None).node_group())
    with pytest.raises(TypeError, match=r"expected a smddp\.ErrorFeedback as state, got NoneType"):
        smddp.error_feedback_hook(None, None)  # type: ignore[arg-type]
    name, tensor = next(iter(saved.items()))
    other = name.replace(f"rank{rank}", f"rank{1 - rank}")
    for wrong, error, text in (
        ([1], TypeError, "got list"),
        ({other: tensor}, ValueError, "unknown key"),
        ({name: tensor[:1]}, ValueError, "expected shape"),
        ({name: tensor.double()}, TypeError, "float64"),
        ({name: 1}, TypeError, "got int"),
    ):
        with pytest.raises(error, match=text):
            state.load_state_dict(wrong)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.state_dict().items())
    with pytest.MonkeyPatch.context() as patch:
        found = InterNodeReduce.format
        patch.setattr(
            InterNodeReduce, "format", lambda self, name, n: found(self, name, n) if name == "all_reduce" else None
        )
        with pytest.raises(ValueError, match="no format for reduce_scatter and all_gather"):
            smddp.ErrorFeedback(model)
    assert internode_reduce(None).comm.sequence() == calls

    unknown = DistributedDataParallel(_net())
    unknown.register_comm_hook(smddp.ErrorFeedback(nn.Linear(2, 2)), smddp.error_feedback_hook)
    with pytest.raises(Exception, match="parameters that the model of ErrorFeedback lacks"):
        _gradients(unknown, 0)


@on_ranks(2)
def test_without_formats_ddp_has_the_same_bits():
    results = []
    for feedback in (False, True):
        model, state = _ddp(feedback)
        results += [_gradients(model, step) for step in range(3)]
    assert state.state_dict() == {}
    assert all(torch.equal(a, b) for i in range(3) for a, b in zip(results[i], results[3 + i], strict=True))


# ---- FSDP2 ----


def _sharded(**options: Any) -> Any:
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("custom collectives in FSDP2 need torch 2.9")
    model = nn.Sequential(*(nn.Linear(151, 151) for _ in range(3)))
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for layer in model:
        fully_shard(layer, reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def _shards(model: Any, steps: range, exact: bool = False) -> list[list[Tensor]]:
    """Returns the gradients of similar steps; parameters are gathered exactly."""
    found = []
    for step in steps:
        random = torch.Generator().manual_seed(dist.get_rank())
        with smddp.exact():
            loss = model((1 + 0.001 * step) * torch.randn(8, 151, generator=random)).square().mean()
        with smddp.exact() if exact else contextlib.nullcontext():
            loss.backward()
        found.append([p.grad.to_local().clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    return found


def _same(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))


def _total(steps: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack([step[i] for step in steps]).double().sum(0) for i in range(len(steps[0]))]


class _Recorder:
    """Records the inputs of a unit's reduce_scatter."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.given = inner, []

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.given.append(input_tensor.clone())
        return self.inner(output_tensor, input_tensor, group, op, async_op)


@_case("apart", "uneven")
def error_of_the_summed_shards_is_that_of_one_step() -> None:
    steps = range(40)
    exact, plain = _total(_shards(_sharded(), steps, exact=True)), _total(_shards(_sharded(), steps))
    model = _sharded()
    experimental.error_feedback_fsdp(model)
    found = _shards(model, steps)
    once = _off(_total(found[:1]), _total(_shards(_sharded(), range(1), exact=True)))
    most = torch.tensor([_off(_total(found), exact), once, _off(plain, exact)], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    kept, once, drift = most.tolist()
    assert kept < 2 * once < drift, (kept, once, drift)


@_case("apart", "uneven")
def a_units_residual_is_its_rounding_error() -> None:
    model = _sharded()
    units = fsdp_overlap.fsdp_units(model, "")
    groups = [group for unit in units.values() for group in fsdp_overlap.fsdp_groups(unit)]
    sent = [_Recorder(group._reduce_scatter_comm) for group in groups]
    for group, recorder in zip(groups, sent, strict=True):
        group._reduce_scatter_comm = recorder
    state = experimental.error_feedback_fsdp(model)
    given = [_Recorder(group._reduce_scatter_comm) for group in groups]
    for group, recorder in zip(groups, given, strict=True):
        group._reduce_scatter_comm = recorder
    _shards(model, range(5))
    internode, residuals = internode_reduce(None), state.state_dict()
    assert set(residuals) == {f"rank{dist.get_rank()}/{number}" for number in range(3)}
    nodes = internode.comm.nodes()
    peers = [rank for rank in range(internode.size) if nodes[rank] == nodes[internode.rank]]
    for tensor, asked, went in zip(residuals.values(), given, sent, strict=True):
        missing = torch.stack(asked.given).double().sum(0) - torch.stack(went.given).double().sum(0)
        missing = missing.view(internode.size, -1)
        missing[internode.remote] -= internode.expanded(tensor, missing.shape[1])
        each = [torch.empty_like(missing) for _ in range(internode.size)]
        with smddp.exact():
            dist.all_gather(each, missing)
        # Summed over the node: each rank contributes a part of the node's sum.
        unexplained, explained = float(sum(each[rank] for rank in peers).abs().max()), float(tensor.abs().max())
        assert unexplained < 1e-3 * explained, (unexplained, explained)


@_case("apart", "uneven")
def loaded_and_overlapped_units_continue_with_the_same_bits() -> None:
    model = _sharded()
    state = experimental.error_feedback_fsdp(model)
    first = _shards(model, range(3))
    saved = state.state_dict()
    second = _shards(model, range(3, 6))

    other = _sharded()
    experimental.overlap_fsdp(other)
    again = experimental.error_feedback_fsdp(other)
    again.load_state_dict(saved)
    assert _same(_shards(other, range(3, 6)), second)
    again.load_state_dict({})
    assert _same(_shards(other, range(3)), first) and not _same(_shards(_sharded(), range(3)), first)

    third = _sharded()
    experimental.error_feedback_fsdp(third)
    experimental.overlap_fsdp(third)
    assert _same(_shards(third, range(3)), first)


@_case("apart")
def units_with_exact_or_missing_gradients_equal_plain_fsdp() -> None:
    model, plain = _sharded(), _sharded()
    state = experimental.error_feedback_fsdp(model)
    with_exact = [_shards(each, range(2), exact=True) for each in (model, plain)]
    assert _same(*with_exact) and state.state_dict() == {}

    def without_bias(module: Any) -> None:
        for layer in module:
            layer.forward = lambda x, layer=layer: x @ layer.weight

    without_bias(model)
    without_bias(plain)
    assert _same(_shards(model, range(2)), _shards(plain, range(2))) and state.state_dict() == {}


@_case("apart")
def unsupported_models_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = _sharded()
    with pytest.raises(TypeError, match="fully_shard was not called for this Linear"):
        experimental.error_feedback_fsdp(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a module, got int"):
        experimental.error_feedback_fsdp(3)  # type: ignore[arg-type]
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    with pytest.raises(ValueError, match="over a second mesh dimension"):
        experimental.error_feedback_fsdp(_sharded(mesh=copies))
    state = experimental.error_feedback_fsdp(model)
    experimental.overlap_fsdp(model)
    with pytest.raises(ValueError, match="was already called for 0"):
        experimental.error_feedback_fsdp(model)
    _shards(model, range(1))
    name, tensor = next(iter(state.state_dict().items()))
    for wrong, error in (({name: tensor[1:]}, ValueError), ({"0": tensor}, ValueError), (tensor, TypeError)):
        with pytest.raises(error):
            state.load_state_dict(wrong)
    assert torch.equal(state.state_dict()[name], tensor)


@pytest.mark.parametrize(("place", "case"), _cases)
def test_between_nodes(pool, place, case):
    pool(place).run(__name__, case, 60)


@pytest.mark.parametrize("format", ["bf16", "f16", "int8"])
def test_rounding_is_idempotent(format):
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(300, GROUP, generator=random) * torch.exp(9 * torch.randn(300, 1, generator=random))
    rows = rows.clamp(-6e4, 6e4)
    rows[0], rows[1], rows[2, 3] = 0.0, 1e-38, -0.0
    once = rounded(rows, format)
    assert torch.equal(rounded(once, format), once)
    left = rows.clone()
    error = round_off(left, format)
    assert torch.equal(left, once) and torch.equal(left + error, rows)
    left[5, 7] = torch.nan
    assert round_off(left, format).isfinite().all() and left[5, 7].isnan()
