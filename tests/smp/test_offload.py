"""Activation offloading in one process: stores, load times, and released memory."""

from __future__ import annotations

import functools
import gc
import sys
from unittest.mock import patch

import pytest
import torch
from smddp.sagemaker import offload
from smddp.sagemaker.offload.engine import Engine
from smddp.sagemaker.offload.movers import StreamMover
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef

WIDTH = 64
ROWS = 16
LAYERS = 6
INPUT = ROWS * WIDTH * 4  # bytes of one layer's input
REENTRANT = [False, True]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *others):
        return x + self.drop(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    """Layers called with the activation and whatever else is passed."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.process_group = "the root's own"

    def forward(self, x, *others):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, *others)
        return x.square().mean()


def checkpointed(reentrant: bool = False, model: nn.Module | None = None) -> nn.Module:
    model = Stack() if model is None else model
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Layer))
    return model


def layers_of(model: nn.Module) -> list[Layer]:
    return [m for m in model.modules() if isinstance(m, Layer)]


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, *steps) -> list:
    """Returns the losses, then the gradients, of forward and backward on each of ``steps``."""
    torch.manual_seed(7)
    losses = []
    for step in steps or (inputs(),):
        loss = model(step)
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in model.parameters()]


def assert_identical(found: list, wanted: list) -> None:
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert torch.equal(a, b), i


class Controls:
    """Enabled offloading with a settable horizon and a separate engine."""

    def __init__(self, monkeypatch) -> None:
        self._monkeypatch = monkeypatch
        self.horizon = 2
        self.use(Engine())
        replacement = offload.prefetching_forward(OffloadWrapper.forward, lambda: self.horizon)
        monkeypatch.setattr(OffloadWrapper, "forward", replacement)

    def use(self, engine: Engine) -> None:
        self.engine = engine
        engine.log = []
        self._monkeypatch.setattr(sys.modules["smddp.sagemaker.offload.engine"], "_engine", engine)

    @property
    def now(self):
        return self.engine.statistics()

    def events(self, *kinds: str) -> list[tuple[str, int]]:
        """(kind, group) of the logged events of these kinds."""
        return [(e.kind, e.group) for e in self.engine.log if e.kind in kinds]

    def assert_nothing_left(self) -> None:
        gc.collect()
        now = self.now
        assert (now.bytes_on_host, now.bytes_resident, now.stores_under_way) == (0, 0, 0)
        assert not self.engine.in_pass()


@pytest.fixture
def on(monkeypatch):
    yield Controls(monkeypatch)
    offload.forget_layers()


# -- the schedule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("horizon", [0, 1, 2, 5])
def test_one_stall_and_horizon_plus_one_groups(on, horizon, reentrant):
    on.horizon = horizon
    wanted = gradients(checkpointed(reentrant))
    found = gradients(offload_wrapper(checkpointed(reentrant)))
    assert_identical(found, wanted)
    assert on.now.stalls == (1 if horizon else LAYERS)
    assert on.now.max_resident_groups == min(horizon + 1, LAYERS)
    assert on.now.bytes_offloaded == LAYERS * INPUT, "exactly the layers' inputs"
    assert on.now.loads == LAYERS, "each group once"
    on.assert_nothing_left()


def test_loads_are_issued_when_backward_reaches_the_group_ahead(on):
    """Horizon 1: reaching g loads g-1, and drops g+1 first."""
    on.horizon = 1
    gradients(offload_wrapper(checkpointed()))
    last = LAYERS - 1
    expected = [("stall", last), ("load", last), ("load", last - 1)]
    for group in range(last - 1, 0, -1):
        expected.append(("load", group - 1))
    assert on.events("stall", "load") == expected


def test_stores_follow_the_forward_and_the_device_tensors_go(on):
    model = offload_wrapper(checkpointed())
    loss = model(inputs())
    assert on.events("store") == [("store", g) for g in range(LAYERS)]
    assert on.events("release") == [("release", g) for g in range(LAYERS)]
    assert on.now.stores_under_way == 0
    assert on.now.bytes_on_host == LAYERS * INPUT
    assert on.now.bytes_resident == 0
    loss.backward()


def test_layers_inputs_die_on_the_device_during_forward(on):
    """Without offloading every layer's input is live at the end of the forward; with offloading, none."""
    alive = []

    def watch(model):
        refs = []
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.register_forward_pre_hook(lambda m, args: refs.append(StorageWeakRef(args[0].untyped_storage())))
        loss = model(inputs())
        alive.append(sum(not r.expired() for r in refs))
        loss.backward()

    watch(checkpointed())
    watch(offload_wrapper(checkpointed()))
    assert alive == [LAYERS, 0]


def test_host_buffers_are_used_again(on):
    model = offload_wrapper(checkpointed())
    gradients(model)
    made = on.now.pool_buffers
    assert made == LAYERS
    gradients(model, inputs(2), inputs(3))
    assert on.now.pool_buffers == made
    assert on.now.pool_reused == 2 * LAYERS


def test_pool_frees_buffers_of_earlier_sizes(on):
    model = offload_wrapper(checkpointed())
    for rows in (16, 64, 256):
        model(torch.randn(rows, WIDTH)).backward()
    gc.collect()
    assert on.now.pool_free_bytes == LAYERS * 256 * WIDTH * 4


# -- several forwards, none, and failures ----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), "sum"])
def test_several_forwards_before_backward(on, order, reentrant):
    """Gradient accumulation and pipelines: each forward's backward stalls once, whatever the order."""

    def run(model):
        torch.manual_seed(7)
        losses = [model(inputs(seed)) for seed in range(3)]
        if order == "sum":
            sum(losses).backward()
        else:
            for i in order:
                losses[i].backward()
        return [loss.detach() for loss in losses] + [p.grad for p in model.parameters()]

    assert_identical(run(offload_wrapper(checkpointed(reentrant))), run(checkpointed(reentrant)))
    assert on.now.stalls == 3
    assert on.now.max_resident_groups == 3
    on.assert_nothing_left()


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_forward_without_backward_leaves_nothing(on, reentrant):
    model = offload_wrapper(checkpointed(reentrant))
    model(inputs())
    on.assert_nothing_left()
    with torch.no_grad():
        model(inputs())
    model.eval()(inputs())
    on.assert_nothing_left()
    assert on.now.stalls == 0


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_exception_in_forward_leaves_nothing_and_the_next_step_is_right(on, reentrant):
    model = offload_wrapper(checkpointed(reentrant))
    hook = layers_of(model)[3].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        model(inputs())
    hook.remove()
    on.assert_nothing_left()
    assert_identical(gradients(model), gradients(checkpointed(reentrant)))


def test_layer_with_a_caught_exception(on):
    """The model catches a layer's exception and goes on: the layer has ended for the engine too."""

    class Forgiving(Stack):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                try:
                    x = layer(x)
                except ZeroDivisionError:
                    x = torch.tanh(x * 2)  # saved outside any layer
            return x.square().mean()

    model = offload_wrapper(checkpointed(model=Forgiving()))
    layers_of(model)[3].register_forward_pre_hook(_raise)
    model(inputs()).backward()
    assert on.events("store") == [("store", g) for g in range(LAYERS)]
    assert on.now.loads == LAYERS - 1
    on.assert_nothing_left()


def test_exception_in_backward_leaves_nothing(on):
    model = offload_wrapper(checkpointed())
    loss = model(inputs())
    hook = layers_of(model)[3].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    del loss
    on.assert_nothing_left()


def _raise(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_second_backward_over_a_retained_graph(on, reentrant):
    def run(model):
        torch.manual_seed(7)
        loss = model(inputs())
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()] + [p.grad for p in model.parameters()]

    assert_identical(run(offload_wrapper(checkpointed(reentrant))), run(checkpointed(reentrant)))
    assert on.now.stalls == 2
    assert on.now.max_resident_groups == 3
    on.assert_nothing_left()


def test_second_backward_over_a_freed_graph_is_torchs_error(on):
    loss = offload_wrapper(checkpointed())(inputs())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# -- which tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_parameters_buffers_and_their_views_are_not_offloaded(on, reentrant):
    class Passing(Stack):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(WIDTH, WIDTH))

        def forward(self, x, *others):
            return super().forward(x, self.first.weight, self.first.weight[1:], self.first.weight.t(), self.table)

    gradients(offload_wrapper(checkpointed(reentrant, Passing())))
    assert on.now.bytes_offloaded == LAYERS * INPUT
    assert len(on.events("save")) == 5 * LAYERS, "they were saved, and kept"


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_one_tensor_saved_by_many_layers_is_stored_once(on, reentrant):
    mask = torch.rand(ROWS, WIDTH)
    model = offload_wrapper(checkpointed(reentrant))
    loss = model(inputs(), mask, mask)
    assert on.now.bytes_offloaded == (LAYERS + 1) * INPUT
    loss.backward(retain_graph=True)
    assert on.now.stalls == 1
    assert sum(e.nbytes for e in on.engine.log if e.kind == "load") == (LAYERS + 1) * INPUT, "and loaded once"
    del loss
    on.assert_nothing_left()


def test_equal_tensors_at_one_address_are_distinguished(on):
    """Memory of a dropped tensor is given to the next: address, size and version are the same, the bytes are not."""

    class Fresh(Stack):
        def forward(self, x):
            total = 0.0
            for i, layer in enumerate(self.layers):
                total = total + layer(self.first(x) * i).square().mean()
            return total

    wanted = gradients(checkpointed(model=Fresh()))
    assert_identical(gradients(offload_wrapper(checkpointed(model=Fresh()))), wanted)
    assert on.now.tensors_offloaded == LAYERS


LAYOUTS = {
    "transposed": lambda: torch.randn(WIDTH, ROWS).t(),
    "channels last": lambda: torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last),
    "every second column": lambda: torch.randn(ROWS, 2 * WIDTH)[:, ::2],
    "expanded": lambda: torch.randn(1, 512).expand(32, 512),
    "offset": lambda: torch.randn(ROWS + 3, WIDTH)[3:],
    "scalar rows of bool": lambda: torch.rand(64, 64) > 0.5,
    "bfloat16": lambda: torch.randn(64, 64).bfloat16(),
    "complex": lambda: torch.randn(32, 32, dtype=torch.complex64),
    "long": lambda: torch.arange(1024),
    "tiny": lambda: torch.randn(3),
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.tensor(3.0),
    "conjugate": lambda: torch.randn(32, 32, dtype=torch.complex64).conj(),
}
STAYING = {"tiny", "empty", "scalar", "conjugate"}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_is_restored(on, kind):
    other = LAYOUTS[kind]()
    copy = other.clone()
    model = offload_wrapper(checkpointed())
    seen = []
    layers_of(model)[2].register_forward_pre_hook(lambda m, args: seen.append(args[1]))
    model(inputs(), other).backward()
    forward, recomputed = seen
    assert recomputed.shape == other.shape
    assert recomputed.stride() == other.stride()
    assert recomputed.dtype == other.dtype
    assert torch.equal(recomputed, copy)
    moved = recomputed.untyped_storage().data_ptr() != forward.untyped_storage().data_ptr()
    assert moved == (kind not in STAYING)
    if kind == "expanded":
        assert on.now.bytes_offloaded == LAYERS * INPUT + 512 * 4, "an expanded tensor travels as it is stored"


@pytest.mark.parametrize("offloading", [False, True])
def test_change_in_place_after_save_is_an_error(on, offloading):
    """Matches torch without offloading: the layer's input changes after the layer has run."""

    class Changing(Stack):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                y = layer(x)
                with torch.no_grad():
                    x.mul_(2)
                x = y
            return x.square().mean()

    model = checkpointed(model=Changing())
    loss = (offload_wrapper(model) if offloading else model)(inputs())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_change_in_place_outside_the_layers_is_an_error(on):
    """torch checks no versions where hooks are set; these hooks do it."""

    class Changing(Stack):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            y = x.square()
            with torch.no_grad():
                x.mul_(2)
            return y.mean()

    loss = offload_wrapper(checkpointed(model=Changing()))(inputs())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- wrappers --------------------------------------------------------------------------------------------------


def test_missing_checkpointing_raises_with_instructions(on):
    with pytest.raises(ValueError, match="apply_activation_checkpointing"):
        offload_wrapper(Stack())(inputs())
    with pytest.raises(ValueError, match="sm_activation_offloading"):
        checkpoint_wrapper(offload_wrapper(Layer()))(inputs())
    offload_wrapper(Stack()).eval()(inputs())


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_nested_wrappers_share_one_pass(on, reentrant):
    def build():
        model = Stack()
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for i, layer in enumerate(model.layers):
            if i % 2:
                model.layers[i] = offload_wrapper(checkpoint_wrapper(layer, impl))
            else:
                model.layers[i] = checkpoint_wrapper(offload_wrapper(layer), impl)
        return model

    wanted = gradients(checkpointed(reentrant))
    assert_identical(gradients(offload_wrapper(build())), wanted)
    assert on.now.stalls == 1
    assert on.now.loads == LAYERS


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_checkpointed_layers_inside_one_another_are_one_group(on, reentrant):
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def build():
        model = checkpointed(reentrant)
        model.layers = nn.ModuleList(
            checkpoint_wrapper(nn.Sequential(*model.layers[i : i + 2]), impl) for i in range(0, LAYERS, 2)
        )
        return model

    wanted = gradients(build())
    assert_identical(gradients(offload_wrapper(build())), wanted)
    assert on.now.loads == LAYERS // 2
    assert on.now.bytes_offloaded == LAYERS // 2 * INPUT


def test_wrappers_side_by_side(on):
    """Two towers: each forward is a pass with a separate schedule."""

    class Towers(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.left, self.right = wrap(checkpointed()), wrap(checkpointed())

        def forward(self, x):
            return self.left(x) + self.right(x)

    wanted = gradients(Towers(lambda m: m))
    assert_identical(gradients(Towers(offload_wrapper)), wanted)
    assert on.now.stalls == 2
    on.assert_nothing_left()


def test_gradient_inside_the_forward(on):
    """A backward that runs while the hooks are set (a gradient penalty): its recomputation opens no groups."""

    class Penalty(Stack):
        def forward(self, x):
            x = self.first(x)
            inner = self.layers[0](x)
            (slope,) = torch.autograd.grad(inner.sum(), x, retain_graph=True)
            for layer in self.layers[1:]:
                inner = layer(inner + slope)
            return inner.square().mean()

    def build():
        """The first layer holds another checkpointed one, which the recomputation enters."""
        model = checkpointed(model=Penalty())
        model.layers[0] = checkpoint_wrapper(nn.Sequential(model.layers[0]))
        return model

    assert_identical(gradients(offload_wrapper(build())), gradients(build()))
    assert on.events("store") == [("store", g) for g in range(LAYERS)]
    on.assert_nothing_left()


def test_wrapper_forwards_attributes_to_the_model():
    assert offload_wrapper(checkpointed()).process_group == "the root's own"


def test_transformers_model(on):
    from smp_cases.models import batch, loss_of, tiny

    def run(model):
        loss = loss_of(model, batch(0))
        loss.backward()
        return [loss.detach()] + [p.grad for p in model.parameters()]

    def build():
        model = tiny("llama", num_hidden_layers=4)
        kind = type(model.model.layers[0])
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
        return model.train()

    assert_identical(run(offload_wrapper(build())), run(build()))
    assert (on.now.stalls, on.now.loads, on.now.max_resident_groups) == (1, 4, 3)
    on.assert_nothing_left()


# -- streams: an accelerator whose copies are late -------------------------------------------------------------


class LateDevice:
    """Fake of torch.cuda. The computing stream is the CPU and runs at once. A side stream runs its work only when
    another stream waits for it, so that every missing wait produces wrong bytes.
    """

    def __init__(self) -> None:
        self.computing = LateDevice.Stream()
        self.active = self.computing

    class Stream:
        def __init__(self, device=None) -> None:
            self.todo: list = []

        def wait_stream(self, other) -> None:
            assert not other.todo, "the computing stream runs at once"

        def wait_event(self, event) -> None:
            self.todo.append(event.synchronize)

    def Event(self):
        return LateEvent()

    def current_stream(self, device=None):
        return LateComputing(self)

    def stream(self, stream):
        device = self

        class Active:
            def __enter__(self):
                device.active = stream

            def __exit__(self, *_):
                device.active = device.computing

        return Active()


class LateEvent:
    def __init__(self) -> None:
        self.reached = False

    def record(self, stream) -> None:
        self.stream = stream
        stream.todo.append(self._reach)

    def _reach(self) -> None:
        self.reached = True

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        while not self.reached:
            self.stream.todo.pop(0)()


class LateComputing:
    """The computing stream as seen by one call: waiting for an event means running what comes before it."""

    def __init__(self, device: LateDevice) -> None:
        self.todo = device.computing.todo

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()


class LateMover(StreamMover):
    """StreamMover over LateDevice: a copy is put on the active stream, and reads its source only when it runs."""

    def __init__(self, device: torch.device) -> None:
        self.late = LateDevice()
        self.parted: list[torch.Tensor] = []  # stands for record_stream, which keeps the memory
        self.after: list = []
        super().__init__(device, self.late, pin_memory=False)

    def _copy(self, stream, target, source, after):
        # Nobody may count on the stream to keep the source: memory that is freed is used again at once.
        storages = [StorageWeakRef(t.untyped_storage()) for t in (target, source)]
        aliases = [torch.empty(0, dtype=t.dtype) for t in (target, source)]
        geometry = [(t.storage_offset(), t.size(), t.stride()) for t in (target, source)]
        target.fill_(float("nan") if target.is_floating_point() else 1)

        def run():
            alive = [torch.UntypedStorage._new_with_weak_ptr(s.cdata) for s in storages]
            assert None not in alive, "released before its copy ran"
            t, s = (a.set_(x, *g) for a, x, g in zip(aliases, alive, geometry))
            t.copy_(s)

        with patch.object(torch.Tensor, "copy_", lambda *_, **__: stream.todo.append(run)):
            return super()._copy(stream, target, source, after)

    def part_with(self, tensor):
        self.parted.append(tensor)

    def store(self, source, host, after):
        self.after.append(after)
        return super().store(source, host, after)


@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("horizon", [0, 2])
def test_late_copies_are_waited_for(on, horizon, reentrant):
    on.horizon = horizon
    on.use(Engine(movers=LateMover))
    wanted = gradients(checkpointed(reentrant), inputs(1), inputs(2), inputs(3))
    found = gradients(offload_wrapper(checkpointed(reentrant)), inputs(1), inputs(2), inputs(3))
    assert_identical(found, wanted)
    assert on.now.stalls == 3 * (1 if horizon else LAYERS)
    assert on.now.pool_buffers == LAYERS, "buffers are used again while copies from them may be under way"
    on.assert_nothing_left()


def test_a_buffer_is_written_after_its_last_copy(on):
    """Also where forward and backward compute on different streams, so that nothing else orders the two."""
    on.use(Engine(movers=LateMover))
    gradients(offload_wrapper(checkpointed()), inputs(1), inputs(2))
    (mover,) = on.engine._movers.values()
    assert mover.after[:LAYERS] == [None] * LAYERS
    assert {event.stream for event in mover.after[LAYERS:]} == {mover._in}, "the loads of the step before"


def test_forward_waits_for_stores_only_two_layers_behind(on):
    on.use(Engine(movers=LateMover))
    under_way = []
    model = checkpointed()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: under_way.append(on.now.stores_under_way))
    model = offload_wrapper(model)
    model(inputs()).backward()
    assert under_way == [1, 2, 3, 3, 3, 3]
    (mover,) = on.engine._movers.values()
    assert len(mover.parted) == 2, "what is under way at the end of the forward is left to the allocator"


def test_late_loads_of_a_failed_backward_do_not_reach_the_next(on):
    """Loads under way when the graph is dropped read host buffers and write device memory that others get next."""
    on.use(Engine(movers=LateMover))
    wanted = gradients(checkpointed(), inputs(2))
    model = offload_wrapper(checkpointed())
    loss = model(inputs(1))
    hook = layers_of(model)[4].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    del loss
    model.zero_grad()
    assert_identical(gradients(model, inputs(2)), wanted)
    on.assert_nothing_left()


def test_late_loads_without_a_reader(on):
    """A backward that ends at layer 4 has asked for 3 and 2; the next begins at the top and drops them."""
    on.use(Engine(movers=LateMover))

    def run(model):
        torch.manual_seed(7)
        seen = []
        hook = layers_of(model)[4].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        loss = model(inputs())
        hook.remove()
        slopes = torch.autograd.grad(loss, seen[0], retain_graph=True)
        loss.backward()
        return [loss.detach(), *slopes] + [p.grad for p in model.parameters()]

    assert_identical(run(offload_wrapper(checkpointed())), run(checkpointed()))
    assert ("evict", 2) in on.events("evict")
    on.assert_nothing_left()


def test_late_copies_of_a_dropped_graph_do_not_reach_the_next(on):
    on.use(Engine(movers=LateMover))
    wanted = gradients(checkpointed(), inputs(2))
    model = offload_wrapper(checkpointed())
    loss = model(inputs(1))
    del loss
    assert_identical(gradients(model, inputs(2)), wanted)
    on.assert_nothing_left()


# -- the switch ------------------------------------------------------------------------------------------------


def test_names_bound_before_see_the_feature(on):
    """Scripts import offload_wrapper before init: the class changes, not the function."""
    assert torch_wrappers.offload_wrapper is offload_wrapper
    gradients(offload_wrapper(checkpointed()))
    assert on.now.tensors_offloaded == LAYERS


def test_reset_removes_the_hooks(on):
    model = offload_wrapper(checkpointed())
    gradients(model)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert sum(hooks) == 2 * LAYERS
    offload.reset()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert on.now.tensors_offloaded == 0
    assert on.now.pool_free_bytes == 0
