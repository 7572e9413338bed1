"""Placement of modules on stages, by the script or by cost. Pure functions except `partition`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from smddp.modelparallel.new_modules import marking
from smddp.modelparallel.private_names import pytree

# Stage that the script sets for a module, and a flag for checkpointed modules, which are never divided.
STAGE = "_smp_stage"
CHECKPOINTED = "_smp_checkpointed"


@dataclass(frozen=True)
class Cost:
    """Cost of one module in one microbatch.

    Attributes:
        order: position of its first call; None: never called.
        flops: floating-point operations of its forward pass.
        bytes: size of its results.
        seconds: duration of its forward pass; 0 if not timed.
    """

    order: int | None = None
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Unit:
    """Modules that are cut off together: (name of the first, its part of the whole cost)."""

    name: str
    module: nn.Module
    cost: float


def owned(module: nn.Module) -> bool:
    """Return True if a module has parameters or persistent buffers, which a stage holds."""
    return next(module.parameters(), None) is not None or any(
        name not in each._non_persistent_buffers_set for each in module.modules() for name in each._buffers
    )


def holds(module: nn.Module) -> bool:
    """Return True if the module has direct parameters or persistent buffers, outside of submodules."""
    return any(q is not None for q in module._parameters.values()) or (
        owned(module) and next(module.children(), None) is None
    )


def called(module: nn.Module) -> bool:
    """Return True if a module can be called; lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def set_partition(module: nn.Module, stage: int) -> None:
    """Places a module and its submodules on a stage. Call it before the first step.

    Args:
        module: The module.
        stage: Number of the stage, from 0.
    """
    for each in module.modules():
        each.__dict__[STAGE] = stage


@contextlib.contextmanager
def partition(stage: int) -> Iterator[None]:
    """Places modules that are created inside on a stage.

    Args:
        stage: Number of the stage, from 0.
    """
    with marking(STAGE, stage):
        yield


def given(model: nn.Module, default: int | None, stages: int) -> dict[str, int]:
    """Return the stages that the script set, by module; ``default``, unless None, for the others.

    Raises ValueError for an unknown stage.
    """
    found = {}
    for name, module in model.named_modules():
        if not holds(module):
            continue
        stage = module.__dict__.get(STAGE, default)
        if stage is None:
            continue
        if not isinstance(stage, int) or not 0 <= stage < stages:
            raise ValueError(f"module {name or 'of the model'} was put on stage {stage}; expected 0 to {stages - 1}")
        found[name] = stage
    return found


def units(
    model: nn.Module, stages: int, costs: dict[str, Cost], memory_weight: float, seconds: bool = False
) -> list[Unit]:
    """Return the indivisible units of the model in order of execution, with their shares of the cost."""
    total = sum(q.numel() for q in model.parameters()) or 1
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        if not owned(module) or id(module) in seen:
            return
        seen.add(id(module))
        own = sum(q.numel() for q in module.parameters())
        large = own > total / (2 * stages) and any(owned(child) for child in module.children())
        split = not called(module) or isinstance(module, nn.Sequential) or large
        if split and CHECKPOINTED not in module.__dict__ and all(q is None for q in module._parameters.values()):
            for key, child in module.named_children():
                visit(child, f"{name}.{key}" if name else key)
        else:
            found.append((name, module))

    visit(model, "")
    last = 1 + max((cost.order for cost in costs.values() if cost.order is not None), default=0)
    orders = [costs.get(name, Cost()).order for name, _ in found]
    ordered = [found[i] for _, i in sorted((last if order is None else order, i) for i, order in enumerate(orders))]
    used = [costs.get(name, Cost()) for name, _ in ordered]
    counted: set[int] = set()
    parameters: list[int] = []
    for _, module in ordered:
        # A shared parameter counts once.
        new = [q for q in module.parameters() if id(q) not in counted]
        counted.update(map(id, new))
        parameters.append(sum(q.numel() * q.element_size() for q in new))
    # A parameter's gradient and its optimizer's state come on top; of results, the part that backward keeps.
    memory = _shares([4.0 * size + cost.bytes for size, cost in zip(parameters, used)])
    work = _shares([cost.seconds if seconds else float(cost.flops) for cost in used]) if costs else memory
    return [
        Unit(name, module, memory_weight * space + (1 - memory_weight) * time)
        for (name, module), space, time in zip(ordered, memory, work)
    ]


def _shares(values: list[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else [1.0 / max(len(values), 1)] * len(values)


def cut(pieces: list[Unit], stages: int) -> dict[str, int]:
    """Return contiguous stages of the units with a minimal maximum cost; users of a parameter share a stage.

    Later stages win a tie. Fewer units than stages leave the last stages empty.
    """
    first: dict[int, int] = {}
    follows: dict[int, int] = {}
    for index, unit in enumerate(pieces):
        leaders = [first[id(q)] for q in unit.module.parameters() if id(q) in first and first[id(q)] != index]
        if leaders:
            follows[index] = min(leaders)
        for q in unit.module.parameters():
            first.setdefault(id(q), follows.get(index, index))
    free = [index for index in range(len(pieces)) if index not in follows]
    costs = [pieces[i].cost + sum(pieces[k].cost for k, leader in follows.items() if leader == i) for i in free]
    stage_of = dict(zip(free, balanced(costs, stages)))
    for index, leader in follows.items():
        while leader in follows:
            leader = follows[leader]
        stage_of[index] = stage_of[leader]
    return {unit.name: stage_of[index] for index, unit in enumerate(pieces)}


def balanced(costs: list[float], stages: int) -> list[int]:
    """Return a stage for each cost, in order, that minimizes the largest sum of a stage."""
    count, stages = len(costs), min(stages, len(costs))
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    begin = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                # Sums in a different order may differ in the last bit, which does not make a cut better.
                largest = round(max(best[stage - 1][start], before[end] - before[start]), 12)
                if largest < best[stage][end]:
                    best[stage][end], begin[stage][end] = largest, start
    found = [0] * count
    end = count
    for stage in range(stages, 0, -1):
        start = begin[stage][end]
        found[start:end] = [stage - 1] * (end - start)
        end = start
    return found


def measure(model: nn.Module, run: object, seconds: bool = False) -> dict[str, Cost]:
    """Return the cost of each module in one call of ``run``, by name. Restores buffers and random states."""
    from time import perf_counter

    from torch.utils.flop_counter import FlopCounterMode

    found: dict[str, Cost] = {}
    names = {module: name for name, module in model.named_modules()}
    begun: dict[nn.Module, tuple[int, float]] = {}
    counter = FlopCounterMode(display=False)

    def before(module: nn.Module, args: object) -> None:
        begun[module] = (counter.get_total_flops(), perf_counter())
        found.setdefault(names[module], Cost(order=len(found)))

    def after(module: nn.Module, args: object, result: object) -> None:
        flops, clock = begun[module]
        old = found[names[module]]
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        found[names[module]] = Cost(
            old.order,
            old.flops + counter.get_total_flops() - flops,
            old.bytes + sum(x.numel() * x.element_size() for x in tensors),
            old.seconds + (perf_counter() - clock if seconds else 0.0),
        )

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(), torch.no_grad(), counter:
            run()  # type: ignore[operator]
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return found
