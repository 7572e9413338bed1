"""Makes `torch.sagemaker` another name of `smddp.sagemaker`, and keeps documented names of moved modules.

Scripts written for SMP import `torch.sagemaker` and its submodules. A finder answers for those names with the modules
of `smddp.sagemaker` themselves, so each module exists once whatever it is called. A `torch/sagemaker` on disk wins.

Every program that imports smddp imports this: no importlib.abc, whose import would cost more than all of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ALIAS = "torch.sagemaker"
REAL = "smddp.sagemaker"

# Documented modules under their former names, which warn.
MOVED = {
    "smddp.devices": "smddp.torch.device_map",
    "smddp.process_group": "smddp.torch.process_group",
    "smddp.reconfigure": "smddp.torch.reconfigure",
    "smddp.torch.error_feedback.fsdp": "smddp.experimental.error_feedback_fsdp",
    "smddp.torch.fsdp_overlap": "smddp.experimental.fsdp_overlap",
}

# Functions of `smddp.experimental` that were documented as functions of `smddp`, which warn.
EXPERIMENTAL = ("error_feedback_fsdp", "overlap_fsdp")


class _Loader:
    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import machinery put the alias's spec on the module, which has run under its own.
        module.__spec__ = self._spec


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED:
            return _moved(fullname, MOVED[fullname])
        if fullname == ALIAS:
            if PathFinder.find_spec(fullname, path) is not None:
                return None
        elif not fullname.startswith(ALIAS + ".") or sys.modules.get(ALIAS) is not sys.modules.get(REAL):
            return None
        import importlib.util

        real = REAL + fullname[len(ALIAS) :]
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(real), is_package=package)  # type: ignore[arg-type]


def _moved(former: str, real: str) -> ModuleSpec:
    _deprecate(former, f"import {real}")
    return ModuleSpec(former, _Loader(real))  # type: ignore[arg-type]


def experimental(name: str) -> object:
    """Returns a function of `smddp.experimental` for its former name in `smddp`, and warns."""
    _deprecate(f"smddp.{name}", f"use smddp.experimental.{name}")
    return getattr(importlib.import_module("smddp.experimental"), name)


def _deprecate(former: str, remedy: str) -> None:
    import warnings

    warnings.warn(f"{former} is deprecated: {remedy}", DeprecationWarning, stacklevel=4)


def install() -> None:
    """Registers the finder for `torch.sagemaker` and moved modules. Idempotent; imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First, since the path finder would find the submodules on the package's path, under the alias's name.
        sys.meta_path.insert(0, _Finder())
