"""Form of the result of an operation on placed tensors, computed without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.private_names import NO_FUNCTION_OVERRIDES, fake_mode, fake_tensor, pytree
from smddp.sagemaker.private_names import storage_key

# Functions with a non-tensor result that depends on values.
NUMBERS = frozenset(
    """item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __format__ __array__ __contains__ __str__
    is_nonzero equal allclose""".split()
)
_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


@dataclass(frozen=True)
class Same:
    """A result that is one of the operands itself."""

    index: int


@dataclass(frozen=True)
class Outcome:
    """The results of an operation.

    Attributes:
        leaves: of each leaf, (its form, or `Same`, or the value itself; its form, or the value itself).
        views: for each leaf, the operand whose memory it shares, or None.
    """

    leaves: tuple[tuple[Any, Any], ...]
    spec: Any
    views: tuple[int | None, ...]

    @property
    def tensors(self) -> bool:
        return any(isinstance(form, Form) for _, form in self.leaves)


class NeedsNumbers(Exception):
    """The operation returns a Python number."""


class NeedsShape(Exception):
    """The form of the operation's result depends on values."""


def key(func: Any, flat: list[Any], spec: Any) -> Any:
    """Return a cache key of everything that a result depends on; None if that is unknown."""
    parts: list[Any] = []
    for x in flat:
        if isinstance(x, Placed):
            parts.append(x.form)
        elif isinstance(x, torch.Tensor):
            parts.append((x.shape, x.dtype, x.device.type))
        elif isinstance(x, slice):
            parts.append((x.start, x.stop, x.step))
        elif isinstance(x, _SIMPLE):
            # True == 1 == 1.0, and these are not the same operands.
            parts.append((type(x), x))
        else:
            return None
    made = (func, spec, tuple(parts), torch.is_grad_enabled(), autocast())
    try:
        hash(made)
    except TypeError:
        return (func, str(spec), *made[2:])
    return made


def autocast() -> Any:
    """Return the autocast state that results depend on."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def foresee(func: Callable[..., Any], name: str, flat: list[Any], spec: Any) -> Outcome:
    """Run the operation on fake tensors.

    Raises:
        NeedsNumbers, NeedsShape: the form depends on values or on an unknown shape.
        Exception: the operation's own error, such as of shapes that do not fit.
    """
    if name in NUMBERS:
        raise NeedsNumbers
    try:
        with NO_FUNCTION_OVERRIDES.get()(), fake_mode():
            fakes = [x.form.fake() if isinstance(x, Placed) else x for x in flat]
            args, kwargs = pytree.tree_unflatten(fakes, spec)
            results, result_spec = pytree.tree_flatten(func(*args, **kwargs))
    except fake_tensor.DataDependentOutputException:
        raise NeedsNumbers from None
    except (fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException, NotImplementedError):
        raise NeedsShape from None
    except Exception as error:
        if any(word in str(error).lower() for word in ("fake", "meta tensor", "unbacked", "data-dependent")):
            raise NeedsShape from None
        raise
    operands = {id(fake): i for i, (fake, x) in enumerate(zip(fakes, flat)) if isinstance(x, Placed)}
    memory = {storage_key(fakes[i]): i for i in operands.values()}
    leaves: list[Any] = []
    views: list[int | None] = []
    for result in results:
        same = operands.get(id(result))
        tensor = isinstance(result, torch.Tensor)
        views.append(memory.get(storage_key(result)) if tensor else None)
        leaves.append(result if not tensor else Form.of(result) if same is None else Same(same))
    # A written operand has a new form; at least it may now require a gradient.
    forms = tuple(Form.of(fakes[leaf.index]) if isinstance(leaf, Same) else leaf for leaf in leaves)
    return Outcome(tuple(zip(leaves, forms)), result_spec, tuple(views))
