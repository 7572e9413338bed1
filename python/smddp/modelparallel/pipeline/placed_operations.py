"""Operations on placed tensors in code between parts: they run on the stage of the larger operand.

The other stages only compute the forms of the results. All stages derive the same transfers from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smddp.modelparallel.pipeline import current, program, shape_inference
from smddp.modelparallel.pipeline.microbatch import Microbatch
from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.pipeline.shape_inference import NeedsNumbers, NeedsShape, Outcome, Same
from smddp.modelparallel.private_names import NO_FUNCTION_OVERRIDES, fake_mode, pytree

_known: dict[Any, Outcome] = {}
# For a plain x, `x += y` may return another tensor, as Python binds the result. torch reports `x += y` and
# `x.add_(y)` under one name.
_AUGMENTED = {f"{name}_": name for name in "add sub mul div floor_divide remainder pow".split()}
_AUGMENTED |= {f"__i{name}__": f"__{name}__" for name in "and or xor lshift rshift matmul".split()}


def writes(name: str) -> bool:
    """Return True if a function of that name writes into its first operand."""
    return name == "__setitem__" or name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


def operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with a placed tensor among its operands."""
    mb = current.microbatch
    name = getattr(func, "__name__", str(func))
    if mb is None:
        raise RuntimeError(f"{name}: a tensor of another stage outside of its step: return it from the step function")
    if mb.backward:
        raise RuntimeError(
            f"{name} runs again during the backward pass: torch.utils.checkpoint goes over modules of several stages. "
            "Use smp.set_activation_checkpointing(module) on each of them"
        )
    if name == "__get__":
        # Other attributes are read from the form, which all stages have.
        with NO_FUNCTION_OVERRIDES.get()(), fake_mode():
            found = func(args[0].form.fake())
        if not isinstance(found, torch.Tensor):
            return found
    elif name == "__set__":
        raise RuntimeError("an attribute of a tensor of another stage cannot be set inside a step")
    flat, spec = pytree.tree_flatten((args, kwargs))
    mb.program.note(name, [x.value.number if isinstance(x, Placed) else 0 for x in flat])
    inplace = writes(name)
    _check_plain(mb, name, flat)
    if inplace and not isinstance(flat[0], Placed):
        func, inplace = _out_of_place(mb, func, name, flat[0]), False
    if isinstance(kwargs.get("out"), torch.Tensor):
        raise RuntimeError(f"{name}(out=...) of tensors of several stages: use what the function returns")
    try:
        outcome = _outcome(func, name, flat, spec)
    except NeedsNumbers:
        plain = pytree.tree_unflatten([mb.fetch(x) if isinstance(x, Placed) else x for x in flat], spec)
        return func(*plain[0], **plain[1])
    except NeedsShape:
        return _run_on_owner(mb, func, flat, spec)
    if not outcome.tensors and not inplace:
        return pytree.tree_unflatten([leaf for leaf, _ in outcome.leaves], outcome.spec)
    owner = _owner(flat, outcome, inplace)
    results = _run(mb, func, name, flat, spec, owner)
    return _wrap(mb, name, flat, outcome, owner, results, inplace)


def _check_plain(mb: Microbatch, name: str, flat: list[Any]) -> None:
    for x in flat:
        if isinstance(x, torch.Tensor) and not isinstance(x, Placed):
            check_plain(mb, name, x)


def check_plain(mb: Microbatch, name: str, x: torch.Tensor) -> None:
    """Check that all stages have the same value of a plain tensor passed to ``name``."""
    if mb.stale and id(x) in mb.stale:
        raise RuntimeError(
            f"{name}: a plain tensor is used again to which a tensor of another stage was added by "
            f"{mb.stale[id(x)][1]}: use what that returned"
        )
    if mb.stages > 1:
        known = mb.parameters_of_parts.get(id(x if x._base is None else x._base))
        if known is not None:
            raise RuntimeError(
                f"{name}: the parameter {known[0]} of stage {known[1]} is used outside of its module, where other "
                "stages do not have it: call the module, or put both users on one stage in one module"
            )
        if x.requires_grad:
            raise RuntimeError(
                f"{name}: a plain tensor of shape {tuple(x.shape)} requires gradients inside a step, and no stage "
                "has computed it: take it out of a module"
            )


def _out_of_place(mb: Microbatch, func: Any, name: str, target: Any) -> Any:
    if name in _AUGMENTED and isinstance(target, torch.Tensor):
        mb.stale[id(target)] = (target, program.at(mb.program.lines[-1]))
        return getattr(torch.Tensor, _AUGMENTED[name])
    raise RuntimeError(
        f"{name} writes a tensor of another stage into a plain tensor, which other stages would not receive: make it "
        "from a tensor of the model, as by x.new_zeros(...) or torch.zeros_like(x), or use torch.stack or torch.cat"
    )


def _outcome(func: Any, name: str, flat: list[Any], spec: Any) -> Outcome:
    key = shape_inference.key(func, flat, spec)
    known = _known.get(key) if key is not None else None
    if known is None:
        known = shape_inference.foresee(func, name, flat, spec)
        if key is not None:
            if len(_known) > 20000:
                _known.clear()
            _known[key] = known
    return known


def _larger(flat: list[Any]) -> int:
    largest = max((x for x in flat if isinstance(x, Placed)), key=lambda x: (x.numel(), x.value.number))
    return largest.value.owner


def _owner(flat: list[Any], outcome: Outcome, inplace: bool) -> int:
    """Return the owning stage: that of a written or inspected operand, else of the larger operand."""
    if inplace:
        return flat[0].value.owner
    for view in outcome.views:
        if view is not None:
            return flat[view].value.owner
    return _larger(flat)


def _run(
    mb: Microbatch, func: Callable[..., Any], name: str, flat: list[Any], spec: Any, owner: int
) -> list[Any] | None:
    """Return the results on ``owner``, None on other stages."""
    for x in flat:
        if isinstance(x, Placed):
            mb.move(x, owner)
    if owner != mb.stage:
        return None
    if writes(name) and isinstance(flat[0], Placed):
        value = flat[0].value
        if value.segment is not mb.segment and len(value.family) > 1:
            raise RuntimeError(
                f"{name} writes into a tensor that others are views of, after tensors passed between stages: write "
                "into a clone"
            )
    args, kwargs = pytree.tree_unflatten([mb.own(x) if isinstance(x, Placed) else x for x in flat], spec)
    mb.streams.swap()
    try:
        return pytree.tree_leaves(func(*args, **kwargs))
    finally:
        mb.streams.swap()


def _wrap(mb: Microbatch, name: str, flat: list[Any], outcome: Outcome, owner: int, results: Any, inplace: bool) -> Any:
    found: list[Any] = []
    for index, ((leaf, form), view) in enumerate(zip(outcome.leaves, outcome.views)):
        tensor = None if results is None else results[index]
        if not isinstance(form, Form):
            found.append(leaf)
            continue
        if tensor is not None and tuple(tensor.shape) != form.shape:
            raise RuntimeError(f"{name} returned shape {tuple(tensor.shape)} where {form.shape} was foreseen")
        if isinstance(leaf, Same) and not inplace:
            found.append(flat[leaf.index])
            continue
        made = mb.placed(form, owner, tensor)
        if isinstance(leaf, Same):
            mb.written(flat[leaf.index], made)
            found.append(flat[leaf.index])
            continue
        if view is not None:
            made.value.join(flat[view].value)
        found.append(made)
    if inplace and not any(isinstance(leaf, Same) for leaf, _ in outcome.leaves):
        _written_unseen(mb, flat, owner)
    return pytree.tree_unflatten(found, outcome.spec)


def _written_unseen(mb: Microbatch, flat: list[Any], owner: int) -> None:
    """Handle a write into the first operand that is not returned, as `x[0] = y`."""
    target = flat[0]
    gradient = torch.is_grad_enabled() and any(isinstance(x, Placed) and x.form.gradient for x in flat)
    form = target.form
    if gradient and not form.gradient:
        form = Form(form.shape, form.stride, form.dtype, True, form.device)
    mb.written(target, mb.placed(form, owner, mb.own(target) if owner == mb.stage else None))


def _run_on_owner(mb: Microbatch, func: Callable[..., Any], flat: list[Any], spec: Any) -> Any:
    """Run an operation on its owner, which sends the description of the result to the others."""
    owner = _larger(flat)
    results = _run(mb, func, getattr(func, "__name__", ""), flat, spec, owner)
    if owner == mb.stage:
        assert results is not None
        forms = [Form.of(x) if isinstance(x, torch.Tensor) else x for x in results]
        mb.say_all(forms)
    else:
        forms = mb.receive_description(owner)
    found = [
        mb.placed(form, owner, None if results is None else results[index]) if isinstance(form, Form) else form
        for index, form in enumerate(forms)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def install() -> Callable[[], None]:
    """Route custom autograd functions between parts through `operation`; returns a function that reverts it."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = before.__get__(None, cls)
        if current.microbatch is not None and any(isinstance(x, Placed) for x in args):
            return operation(_Custom(cls, original), args, kwargs)
        return original(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]

    def undo() -> None:
        torch.autograd.Function.apply = before

    return undo


class _Custom:
    """Forward pass of a custom autograd function, as a named function."""

    def __init__(self, kind: Any, apply: Callable[..., Any]) -> None:
        self.__name__, self._kind, self._apply = kind.__name__, kind, apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Custom) and other._kind is self._kind

    def __hash__(self) -> int:
        return hash(self._kind)


Placed.operation = staticmethod(operation)
