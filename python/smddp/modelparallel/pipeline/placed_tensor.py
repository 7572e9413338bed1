"""Placed tensors: results of a module on one stage, and values computed from them.

Every stage has one per value: the owner holds the tensor, the other stages only its form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from smddp.modelparallel.pipeline.values import Value, arrival
from smddp.modelparallel.private_names import MAKE_WRAPPER


@dataclass(frozen=True, slots=True)
class Form:
    """Metadata of a tensor, known to all stages."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    device: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, tensor.device.type)

    def alike(self, other: Form) -> bool:
        """Return True if the same operations on both have results of the same form."""
        return self.shape == other.shape and self.dtype == other.dtype and self.gradient == other.gradient

    def fake(self) -> torch.Tensor:
        """Return a fake tensor of this form that is not an autograd leaf. Call it under `fake_mode()`."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return arrival(empty)[0] if self.gradient else empty


def _no_backward(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "loss.backward() sees only this stage's part of the graph: call model.backward(loss) inside the step"
    )


class Placed(torch.Tensor):
    """Tensor of one stage with metadata on all stages."""

    form: Form
    value: Value
    # Set by `smddp.modelparallel.pipeline.placed_operations`, which uses this module.
    operation: Callable[[Any, Any, Any], Any]

    @staticmethod
    def __new__(cls, form: Form, value: Value) -> Placed:
        made = MAKE_WRAPPER.get()(
            cls, form.shape, strides=form.stride, dtype=form.dtype, device=torch.device(form.device)
        )
        made.__dict__["form"], made.__dict__["value"] = form, value
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.operation(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} got a tensor of another stage below torch's Python functions, as compiled or scripted code does: "
            "put that code into a module with parameters of one stage, or under smp.set_partition()"
        )

    # Frequent attributes, answered without dispatch through torch.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.form.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.form.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.form.device)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.form.shape)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.form.gradient

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.form.device == "cuda"

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return not self.form.gradient

    @property
    def grad(self) -> None:  # type: ignore[override]
        return None

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return torch.Size(self.form.shape) if dim is None else self.form.shape[dim]

    def dim(self) -> int:
        return len(self.form.shape)

    def numel(self) -> int:
        return prod(self.form.shape)

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.form.stride if dim is None else self.form.stride[dim]

    def is_floating_point(self) -> bool:
        return self.form.dtype.is_floating_point

    def __len__(self) -> int:
        if not self.form.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.form.shape[0]

    def __hash__(self) -> int:
        return id(self)

    backward = _no_backward

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed(stage {self.value.owner}, shape {self.form.shape}, {self.form.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of another stage cannot be pickled or copied inside a step: return it")
