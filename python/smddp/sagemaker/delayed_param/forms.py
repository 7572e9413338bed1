"""Original names and shapes of a module's parameters, as its initialisation functions expect them.

Tensor parallelism turns parameters into DTensors and reshapes or splits some of them; the module records that
(`tensor_parallel.shards.Relayout`). Initialisation functions use the original names and full shapes. A form describes
both, so that values are computed in full and then stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from smddp.sagemaker.tensor_parallel.shards import RELAID, Relayout


@dataclass(frozen=True)
class Form:
    """One parameter under its original name: full shape, dtype, and an identity that tied parameters share."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    identity: int

    def empty(self, device: torch.device | str) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device=device), requires_grad=self.requires_grad)


def _records(module: nn.Module) -> dict[str, Relayout]:
    return vars(module).get(RELAID, {})


def original_names(module: nn.Module) -> dict[str, str]:
    """Returns the original name of each parameter that the module holds."""
    names = {name: name for name in module._parameters}
    for record in _records(module).values():
        names.update(dict.fromkeys(record.stored, record.source))
    return names


def forms_of(module: nn.Module) -> dict[str, Form | None]:
    """Returns the original forms of the module's direct parameters; None for a parameter registered as None."""
    found: dict[str, Form | None] = {
        name: None if p is None else Form(p.shape, p.dtype, p.requires_grad, id(p))
        for name, p in module._parameters.items()
    }
    for record in _records(module).values():
        # None of them is None: only a parameter that is there is stored otherwise.
        stored = [form for name in record.stored if (form := found.pop(name)) is not None]
        joined = record.join(*(torch.empty(form.shape, dtype=form.dtype, device="meta") for form in stored))
        found[record.source] = Form(joined.shape, joined.dtype, stored[0].requires_grad, stored[0].identity)
    return found


def stored_from(module: nn.Module, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts full values, by original name, to the module's storage; removes them from ``whole``."""
    found: dict[str, torch.Tensor] = {}
    for record in _records(module).values():
        if record.source in whole:
            found.update(zip(record.stored, record.split(whole.pop(record.source))))
    found.update(whole)
    whole.clear()
    return found
