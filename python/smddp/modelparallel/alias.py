"""`model.module.module`: further names of the script's model, as releases with an inner wrapper had them."""

from __future__ import annotations

from typing import Any

from torch import nn

# Levels below DistributedModel.module: the developer guide writes `model.module.module.module`.
_LEVELS = 2


class Alias:
    """A module under another name. The chain ends, since callers unwrap models while they have a ``module``."""

    __slots__ = ("_levels", "_module")

    def __init__(self, module: nn.Module, levels: int) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_levels", levels)

    def __getattr__(self, name: str) -> Any:
        if name != "module":
            return getattr(self._module, name)
        if self._levels == 1:
            raise AttributeError(name)
        return Alias(self._module, self._levels - 1)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._module)

    def __getitem__(self, key: Any) -> Any:
        module: Any = self._module
        return module[key]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Alias, (self._module, self._levels)

    # `isinstance` and marks in a module's attributes hold under every name.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self._module.__dict__


def add_aliases(module: nn.Module) -> None:
    """Let the innermost module under the name ``module`` answer for further levels of it."""
    while isinstance(inner := module._modules.get("module"), nn.Module):
        module = inner
    if not hasattr(module, "module"):
        # Outside nn.Module's registry, which gives state dicts their names.
        module.__dict__["module"] = Alias(module, _LEVELS)
